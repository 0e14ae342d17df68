"""Refused."""

from heavylift.api.refused import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec

from . import engine, module, topology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec", "engine", "module", "topology"]
