"""The config groups of Hydra. Only YAML lives here.

`strategy` and `hydra` are installed as the package `lightning_zero.conf`, for any app: write
``hydra.searchpath: [pkg://lightning_zero.conf]`` and ``defaults: [- strategy: zero2]`` in its own config, and
``strategy: ${strategy}`` in its trainer node. `train.yaml` and the other groups belong to examples/train.py.
"""
