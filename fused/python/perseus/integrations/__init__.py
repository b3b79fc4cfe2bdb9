# SPDX-License-Identifier: Apache-2.0
"""Adaptors for frameworks, a module each. They import their framework, so perseus does not import them."""
