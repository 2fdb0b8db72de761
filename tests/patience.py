"""How long a test waits for what has to happen, on a machine with other things to do.

A limit ends what hangs and says where. It is no part of what a test shows: nobody waits for it when
all is well.
"""

PATIENCE_SECONDS = 600
