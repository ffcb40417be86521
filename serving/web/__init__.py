# SPDX-License-Identifier: Apache-2.0
"""The API that clients of OpenAI's embeddings know, in front of a router."""
