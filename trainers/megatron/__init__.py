"""The only package that imports Megatron-core and mbridge.

Known warnings that tell a user nothing are silenced here, before the first of them can appear.
"""

import logging
import warnings

for _message in (
    r".*Apex (is|are) not installed",  # torch's own optimizer and norms are used on purpose
    r"full scope is deprecated",  # about CUDA graphs, which are not used
    r"The \.grad attribute of a Tensor that is not a leaf",  # Megatron looks before it clears
    r"MLP requires ffn_hidden_size",  # where it is the default that is meant
    r"Warning: tp_group is None",  # the one tensor-parallel group is meant
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)
# There is one generator on CPU: what it changes for one purpose has changed for the other.
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
