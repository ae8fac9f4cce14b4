"""Where keys and values live: the block pool, block tables with rewind, the prefix cache.

This room counts blocks and hashes token ids. It refuses to know tensors, models and clocks: a
block is a number here, and the law it keeps is free + used + cached = all.
"""
