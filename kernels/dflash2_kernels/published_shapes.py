"""The shapes that models and checks of kernels use: Qwen3-4B with its published DFlash 2 drafter (block of 8 rows, 16 candidates,
selector rank 256, convolution of 2 taps over groups of 16 channels), and how many requests a step carries."""

HIDDEN = 2560
VOCAB = 151936
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
TARGET_LAYERS, DRAFTER_LAYERS = 36, 5
DRAFT_BLOCK = 8  # anchor and 7 drafts
CANDIDATES, SELECTOR_RANK = 16, 256
CONV_TAPS, CONV_GROUP = 2, 16
BATCHES = (1, 8, 64)
