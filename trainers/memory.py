"""How a training process on CPU keeps its memory: in its environment, because glibc's malloc reads it once, at the start.

A step frees and takes buffers of tens of megabytes all the time (logits, gradients of the embedding). By default each of
them is mapped anew and its pages are cleared on first touch, a tenth of the CPU time of a step of SmolLM2-135M. With these
settings what is freed is kept for the next one; one arena, because large buffers are only kept in the first. On GPU, and
elsewhere than on glibc, they change nothing that matters.
"""

KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
