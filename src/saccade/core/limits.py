# SPDX-License-Identifier: Apache-2.0
"""Limits for files that commands read: the largest legitimate one known, with a margin."""

# JSON: a CLIP's 49,152 merges are 0.7 MB and 50,000 values; a manifest nests 6 deep.
JSON_BYTES = 32 * 2**20
JSON_DEPTH = 64
JSON_VALUES = 2_000_000
# A text file with one name or number per line.
TEXT_BYTES = 32 * 2**20
LABELS = 100_000  # ImageNet-21k has 21,843
LABEL_CHARACTERS = 1_000

# A file of a training run's options; one with all of them has 4 kB.
RECIPE_BYTES = 2**16
RECIPE_DOTS = 500  # in a line: the parser of TOML squares those of a key

# Weights. The largest families here have 10**9 parameters in 2,000 tensors.
WEIGHTS_BYTES = 16 * 2**30
TENSORS = 100_000
PARAMETERS = 2**32
AXES = 16  # NumPy supports 32, torch 25
NAME_CHARACTERS = 1_000

# A configuration of a model.
SIZE = 2**20  # of anything that is counted: channels, pixels of a side, words
LAYERS = 256  # in total; also rounds that are unrolled
SEED = 2**63 - 1
LIST = 2**20
PIXELS = 2**17  # per side of an image
IMAGE_PIXELS = 2**26  # per image that a model takes

# Preprocessing: pixels from 0 to 255 that were never scaled have a std of up to 255.
STD = (1e-6, 1e6)
MEAN = 1e6

# Archives of arrays, and files that torch.save writes.
ARCHIVE_FILES = TENSORS
ARCHIVE_DIRECTORY_BYTES = 8 * 2**20
ARCHIVE_RATIO = 1_000  # unpacked to packed; deflate can reach 1,032, as with arrays of zeros
ARCHIVE_FREE_BYTES = 512 * 2**20  # below it, any ratio
ARRAY_HEADER_BYTES = 10_000  # NumPy's own limit: a longer literal may overflow the parser's stack
PICKLE_BYTES = 16 * 2**20  # for names and shapes; the numbers are stored separately
PICKLE_OPCODES = 1_000_000  # about 25 per tensor
PICKLE_DEPTH = 64
TREE_VALUES = 1_000_000  # in a state dict, counted each time that they are reached

# A line of a table that lists the user's samples, and rows without a byte each.
TABLE_LINE = 2**20
TABLE_FREE_ROWS = 2**20

# The file of an image that is sent or read: the most that a router can be told to take.
IMAGE_BYTES = 2**30
