# SPDX-License-Identifier: Apache-2.0
"""Files that people have: rows in, results out.

`opening` finds out what a file is and gives its plain bytes, `lines` cuts them without trusting them, `rows`,
`openai` and `tables` turn them into requests, `seen` refuses an id that came before, `shapes` writes results.
"""
