"""Checkpoints and what computes them: one file per architecture, strict loaders, tokenizers.

    checkpoint    open_checkpoint(path): configuration, tensors under hub names, tokenizer
    registry      model_type → the module that computes it
    config        ArchitectureConfig, read from config.json or GGUF metadata (no torch)
    tokenizer     encode, decode, chat templates, incremental detokenizing (no torch)
    fetch         names → local paths (no torch)
    tiny          seeded miniature checkpoints

Importing this package imports none of them. The room refuses to know requests, schedules and
ranks, and it never executes anything that a checkpoint contains.
"""
