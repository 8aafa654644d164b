# SPDX-License-Identifier: Apache-2.0
"""Jobs that the broker keeps: sent, watched and collected, whatever dies in between.

`calls` speaks to the JobService, `spec` names a job by what its file holds, `upload` sends rows, `output` and `collect`
write results, `whole` does all of it for `ifab bulk run`, `verbs` are the commands.
"""
