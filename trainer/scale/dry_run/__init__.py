"""The dry run of a cluster: only preflight_gpu loads this folder.

ledger.py uses names that torch may change without notice: `torch.distributed._tools`,
`torch._subclasses.fake_tensor`, `torch.testing._internal.distributed.fake_pg`,
`DTensor._local_tensor`. It replaces, during a dry run, `torch.UntypedStorage.resize_` and
`torch.utils.swap_tensors`, and of leash `token_distribution.SLICE` and
`products.ONEDNN_IS_FASTER`.

torch 2.13's own trackers do not fit: `MemTracker` fails at a frozen model, which a reference is,
`FSDPMemTracker` at a second forward of the root, and neither counts collectives or host memory.
"""
