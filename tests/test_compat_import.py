"""`import deepspeed` resolves to heavylift: every listed name, its metadata, what is missing, and who was first."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import command_env

import heavylift
from heavylift.compat import DEEPSPEED_VERSION

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "heavylift" / "compat" / "deepspeed"
NAMES = {
    "": "DeepSpeedConfigError OnDevice add_config_arguments init_distributed initialize DeepSpeedEngine "
    "DeepSpeedConfig zero ops utils comm runtime checkpointing get_accelerator log_dist logger "
    "PipelineModule init_inference add_tuning_arguments",
    "accelerator": "get_accelerator",
    "accelerator.real_accelerator": "get_accelerator",
    "checkpointing": "checkpoint configure is_configured reset",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "comm": "init_distributed is_initialized get_rank get_world_size barrier broadcast all_reduce ReduceOp",
    "elasticity": "compute_elastic_config",
    "elasticity.config": "ElasticityError ElasticityIncompatibleWorldSize",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME",
    "moe.layer": "MoE",
    "monitor.comet": "CometMonitor",
    "monitor.config": "DeepSpeedMonitorConfig get_monitor_config",
    "monitor.csv_monitor": "csvMonitor",
    "monitor.monitor": "MonitorMaster",
    "monitor.tensorboard": "TensorBoardMonitor",
    "monitor.wandb": "WandbMonitor",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion",
    "pipe": "PipelineModule LayerSpec TiedLayerSpec",
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "runtime.activation_checkpointing": "checkpointing",
    "runtime.config": "DeepSpeedConfig get_gradient_clipping get_log_level",
    "runtime.config_utils": "DeepSpeedConfigModel",
    "runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.lr_schedules": "VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "runtime.pipe.topology": "PipeDataParallelTopology PipeModelDataParallelTopology",
    "runtime.precision_config": "DeepSpeedFP16Config get_bfloat16_config",
    "runtime.utils": "see_memory_usage",
    "runtime.zero": "GatheredParameters unwrap_model_for_generation Init",
    "runtime.zero.config": "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
    "runtime.zero.offload_config": "DeepSpeedZeroOffloadOptimizerConfig",
    "runtime.zero.partition_parameters": "ZeroParamStatus Init GatheredParameters",
    "runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_live "
    "estimate_zero3_model_states_mem_needs_all_cold",
    "runtime.zero.stage_1_and_2": "estimate_zero2_model_states_mem_needs_all_live",
    "utils": "RepeatingLoader get_z3_leaf_modules logging safe_get_full_fp32_param safe_get_full_grad "
    "safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param "
    "safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_modules "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module logger log_dist",
    "utils.groups": "_get_data_parallel_group _get_sequence_parallel_group",
    "utils.timer": "SynchronizedWallClockTimer ThroughputTimer",
    "utils.zero_to_fp32": "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
    "load_state_dict_from_zero_checkpoint",
    "zero": "GatheredParameters Init MiCS_Init set_weights_source RandomWeights",
}
"""Names found in public code that uses DeepSpeed."""


def run_python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=command_env(), cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_every_listed_name_is_imported(tmp_path: Path) -> None:
    code = f"""
import functools, importlib, importlib.metadata, importlib.util, pkgutil, sys
import heavylift.compat
names = {NAMES!r}
for path, words in names.items():  # `import heavylift as deepspeed`, nothing else imported
    if path.partition(".")[0] not in ("checkpoint", "launcher", "monitor") and path != "utils.zero_to_fp32":
        for word in words.split():
            functools.reduce(getattr, (path + "." + word).lstrip(".").split("."), heavylift)
heavylift.compat.install(); heavylift.compat.install()
for path, words in names.items():
    module = importlib.import_module("deepspeed" + ("." + path if path else ""))
    missing = [word for word in words.split() if not hasattr(module, word)]
    if missing: print("missing", path, missing)
import deepspeed
import deepspeed.ops.adam as adam, heavylift.api.optimizers as ours
assert adam.FusedAdam is ours.FusedAdam
assert deepspeed.zero.Init is deepspeed.runtime.zero.Init
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == {DEEPSPEED_VERSION!r}
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("torch")
for found in pkgutil.walk_packages(deepspeed.__path__, "deepspeed."):
    importlib.import_module(found.name)
assert callable(deepspeed.utils.z3_leaf_module)  # its module has its name
for statement in ("import deepspeed.sparse", "from deepspeed.ops.adam import Nonsense", "import deepspeed.ops.adam.x"):
    try: exec(statement)
    except ImportError as error: print(type(error).__name__, error)
"""
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing, nonsense, inner = done.stdout.splitlines()
    assert missing.startswith("ModuleNotFoundError No module named 'deepspeed.sparse': deepspeed is heavylift here,")
    assert "deepspeed has accelerator, checkpoint, checkpointing, comm, elasticity" in missing
    assert nonsense.startswith("ImportError cannot import name 'Nonsense' from 'deepspeed.ops.adam'")
    assert "deepspeed.ops.adam has cpu_adam, fused_adam;" in inner


def test_another_deepspeed_that_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0'\n")
    code = "import sys; sys.path.insert(0, '.')\nimport {}heavylift.compat\nheavylift.compat.install()\n"
    late = run_python(code.format("deepspeed, "), cwd=tmp_path)
    assert late.returncode == 2 and late.stderr.count("\n") == 1, late.stderr
    assert late.stderr.startswith("error: <string>:3: heavylift.compat.install: another deepspeed (")
    before = run_python(code.format("") + "import deepspeed; print(deepspeed.__version__)", cwd=tmp_path)
    assert before.stdout.strip() == DEEPSPEED_VERSION


def test_without_install_nothing_changes(tmp_path: Path) -> None:
    code = "import heavylift.compat, importlib.util as u, sys; print(u.find_spec('deepspeed'), 'torch' in sys.modules)"
    assert run_python(code, cwd=tmp_path).stdout.split() == ["None", "False"]


def test_modules_there_only_re_export() -> None:
    """DeepSpeed's layout must not become ours: nothing is implemented in the folder."""
    allowed = {"heavylift/compat/deepspeed/runtime/zero/partition_parameters.py"}
    for path in FOLDER.rglob("*.py"):
        text = path.read_text()
        made = re.findall(r"^(?:def|class) (\w+)", text, re.M)
        relative = str(path.relative_to(ROOT))
        assert not set(made) - {"__getattr__"} or relative in allowed, (relative, made)
        assert len(text.splitlines()) < 100, relative


def test_nothing_imports_the_folder() -> None:
    """Only the package itself does, for the names of `import heavylift as deepspeed`, when they are used."""
    package = ROOT / "heavylift" / "__init__.py"
    for path in (ROOT / "heavylift").rglob("*.py"):
        if FOLDER not in path.parents and path != package:
            assert "heavylift.compat.deepspeed" not in path.read_text(), path


def test_the_page_lists_every_name() -> None:
    """docs/deepspeed_api.md: each listed name once, and in agreement with what the name does."""
    page = (ROOT / "docs" / "deepspeed_api.md").read_text()
    rows = re.findall(r"^\| `([^`|]+)` \| (done|thin|refused) \|", page, re.M)
    listed = dict(rows)
    assert len(rows) == len(listed), "a name is listed twice"
    expected = {f"{path}.{word}".lstrip(".") for path, words in NAMES.items() for word in words.split()}
    assert expected - listed.keys() == set()
    for name, status in listed.items():
        value = _resolve(name)
        refused = (inspect.isclass(value) and _is_refused(value)) or value in _refusing_functions()
        assert refused == (status == "refused"), (name, status)


def _resolve(name: str) -> object:
    path, _, word = name.rpartition(".")
    module = importlib.import_module("heavylift.compat.deepspeed" + ("." + path if path else ""))
    return getattr(module, word)


def _is_refused(value: type) -> bool:
    from heavylift.api import optimizers, refused, zero

    return issubclass(value, (refused.Refused, optimizers._Refused, zero.MiCS_Init, zero.TiledLinear))


def _refusing_functions() -> list[object]:
    from heavylift.api import refused

    return [refused.init_inference, refused.tp_model_init]


def test_heavylift_as_deepspeed_has_the_same_top_level_names() -> None:
    """`import heavylift as deepspeed`: the same objects as under `--as-deepspeed`."""
    compat = importlib.import_module("heavylift.compat.deepspeed")
    own = {"checkpoint", "launcher", "monitor"} | {"__version__", "__git_branch__", "__git_hash__"}
    for word in set(compat.__all__) - own:
        assert word in heavylift.__all__, word
        assert getattr(heavylift, word) is getattr(compat, word), word
    assert set(heavylift.__all__) - set(compat.__all__) == {"Engine", "UserError", "DeepSpeedCPUAdam", "FusedAdam"}
    assert all(getattr(heavylift, word) is not None for word in heavylift.__all__)
    with pytest.raises(heavylift.UserError, match="init_inference: .* not supported; call the model"):
        heavylift.init_inference(None)
    with pytest.raises(AttributeError, match="no attribute 'init_compression'; docs/deepspeed_api.md lists"):
        heavylift.init_compression  # noqa: B018
    assert json.dumps(heavylift.__version__)


def test_zero_is_the_same_by_every_path() -> None:
    from heavylift.api import zero

    for path in ("zero", "runtime.zero"):
        module = _resolve(path)
        assert isinstance(module, ModuleType)
        assert {word for word in zero.__all__ if getattr(module, word, None) is not getattr(zero, word)} == set(), path


def test_imports_on_the_pages_are_there() -> None:
    """What README and docs write in place of DeepSpeed's imports, names reached through `deepspeed` included."""
    pages = [ROOT / "README.md", ROOT / "docs" / "deepspeed.md", ROOT / "docs" / "deepspeed_api.md"]
    text = "\n".join(page.read_text() for page in pages)
    imports = re.findall(r"from (heavylift\.[\w.]+) import (\w+)", text)
    assert imports
    for module, word in imports:
        assert getattr(importlib.import_module(module), word) is not None, (module, word)
    for path in re.findall(r"(?<![\w.])deepspeed((?:\.[A-Za-z]\w*)+)", text):
        if path not in (".x", ".md", ".__version__"):
            functools.reduce(getattr, path.strip(".").split("."), heavylift)
