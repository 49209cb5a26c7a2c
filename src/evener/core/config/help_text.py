"""The settings in groups, with one line for each, for ``--help``. ``RunConfig`` holds the full help texts."""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "training": {
        "batch_size": "samples in a global batch, over all ranks",
        "epochs": "passes over the training data",
        "steps": "stop after this many steps, whatever the epochs",
        "seed": "seed of weights, order of samples and dropout",
        "micro_batch": "cut batches into parts of at most N samples; or auto",
        "clip_norm": "clip gradients to this global norm",
        "non_finite": "on a NaN or inf: stop, skip or restore",
        "evaluate_every": "evaluate after every N epochs; 0: at the end",
        "weights": "start with these weights: safetensors, state_dict, run",
    },
    "devices": {
        "processes": "ranks on this machine, or MIN:MAX",
        "device": "kind of device: cpu, cuda, ..., or mixed (default: cuda if any)",
        "strategy": "how a step runs over ranks: see evener list",
        "strategy_option": "an option of the strategy; may be repeated",
        "mesh": "ranks along the axes, such as data=2,tensor=2",
        "devices": "devices of one process, such as cuda:0,cuda:1",
    },
    "shares of a batch": {
        "balance": "equal, auto, W0,W1,... or package.module:Class",
        "max_shares": "most samples of each rank, such as 64,- (-: no limit)",
        "share_multiple_of": "round shares to multiples of N",
        "throttle": "EMULATE unequal devices: speeds such as 1,0.5",
        "throttle_at": "EMULATE a change of speed; may be repeated",
    },
    "gradients and BatchNorm between ranks": {
        "allreduce": "how gradients are summed: see evener list",
        "compress": "send fewer bits, not exact: fp16, int8, top-k, ...",
        "bucket_mb": "buckets in which gradients are sent, in MiB",
        "exact": "bits: the same bits on any division",
        "grain": "with bits: samples that are computed together",
        "block": "with bits: grains that one rank computes",
        "audit": "with bits: part of blocks that two ranks compute",
        "batch_norm": "exact: all ranks' samples; local: own; grain",
    },
    "precision and compiling": {
        "dtype": "type of weights and inputs, such as float64",
        "precision": "precision of computing: fp32, tf32, bf16, fp16, auto",
        "precision_of": "precision of a module, as head=fp32; may be repeated",
        "compile": "torch.compile blocks, the whole model, or auto",
        "compile_mode": "torch.compile's mode, such as reduce-overhead",
        "compile_backend": "torch.compile's backend",
        "compile_check": "wrong compiled code: replace, stop or no",
        "cuda_graphs": "auto: replay steps of known shapes as CUDA graphs",
        "fused_optimizer": "use PyTorch's fused Adam: auto or no",
    },
    "memory": {
        "memory_limit": "most device memory of a rank: 24GB, or one for each",
        "memory_limit_at": "change the limit from STEP on; may be repeated",
        "recompute": "compute blocks again in backward: blocks, 60%, 8GB",
        "offload": "move to host memory: optimizer, activations, or both",
        "offload_to": "move it to files of this directory instead",
        "optimizer_state": "8bit: Adam's state in 8 bits, changes results slightly",
        "update_in_backward": "update in backward, freeing gradients as they come",
    },
    "data": {
        "workers": "processes that load data, for each rank",
        "check_data": "read samples twice first: exact or augmented",
        "on_bad_sample": "samples that cannot be read: stop or skip",
    },
    "run directory": {
        "run_dir": "directory of the run (default: runs/TASK-TIME)",
        "overwrite": "replace a finished run that is there",
        "resume": "continue this run; auto: that of --run-dir",
        "override": "use the task's lr, ..., not the checkpoint's",
        "save_every": "checkpoints: 500 (steps), 10min, 1epoch",
        "keep": "keep the last N checkpoints",
        "keep_best": "also keep the best by METRIC, METRIC:min or METRIC:max",
        "save_mode": "async, or blocking: training waits",
        "on_full_disk": "stop, or go-on without records",
        "profile": "trace N steps of each rank by torch.profiler",
        "metrics_file": "live figures for Prometheus, in a *.prom file",
    },
    "faults": {
        "timeout_seconds": "longest wait for other ranks",
        "grace_seconds": "time to save and end after Ctrl-C",
        "notice_command": "status 0: this host is about to be taken away",
        "check_replicas": "compare the ranks' state every N steps; 0: never",
        "on_replica_mismatch": "where ranks differ, take the state of majority or rank0",
        "recover": "after a death: memory of others, or file",
        "lean": "watch no gradients and no memory, for the last per cent",
    },
}


def brief(name: str, help: str) -> str:
    """Returns the line of a setting. If it has none, returns the beginning of its full help text."""
    found = next((lines[name] for lines in GROUPS.values() if name in lines), None)
    return found or help.partition(";")[0].partition(":")[0].partition(" (")[0]


def group_of(name: str) -> str:
    """Returns the title of the group of a setting, or "other settings"."""
    return next((title for title, lines in GROUPS.items() if name in lines), "other settings")
