"""KV blocks as numbers: who holds which, what may be shared, what may be forgotten.

Knows no tensor, request or step; a block is an index, its content is the worker's business.
"""

from drumline.kvcache.pool import BlockPool, blocks_for
from drumline.kvcache.prefix import PrefixChain
from drumline.kvcache.table import BlockTable

__all__ = ["BlockPool", "BlockTable", "PrefixChain", "blocks_for"]
