# SPDX-License-Identifier: Apache-2.0
"""`saccade explore`: a page in the browser that asks a served model about one's own image."""
