"""Training curves for the programs that people watch them in: TensorBoard, Weights & Biases, Comet, CSV files.

One small file per sink; `master.py` writes to all of them. Packages of others are imported where a sink is made.
"""
