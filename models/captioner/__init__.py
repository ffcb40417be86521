# SPDX-License-Identifier: Apache-2.0
"""An LSTM that captions an image and looks at it twice a word: before and after its state moves."""
