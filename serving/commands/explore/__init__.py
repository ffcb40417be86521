# SPDX-License-Identifier: Apache-2.0
"""`saccade explore`: a web page that sends your own images to a served model."""
