def cpu_features() -> dict[str, bool]: ...
def available_paths() -> list[str]: ...

class PackedLinear:
    def __init__(self, kind: str, raw: int, outputs: int, columns: int) -> None: ...
    @staticmethod
    def stack(kind: str, raw: list[int], outputs: list[int], columns: int) -> PackedLinear: ...
    def take_rows(self, ids: int, count: int, out: int, /) -> None: ...
    def multiply(
        self,
        x: int,
        rows: int,
        x_stride: int,
        out: int,
        out_stride: int,
        threads: int,
        path: str,
        fine: bool,
    ) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Workspace:
    """Instruction-set path, precision of activations, and memory between operations."""

    def __init__(self, path: str, fine: bool) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Dense:
    def __init__(self, parts: list[PackedLinear], bias: int) -> None: ...
    def take_rows(self, ids: int, count: int, out: int, /) -> None: ...
    def linear(
        self,
        space: Workspace,
        norm: int,
        eps: float,
        x: int,
        rows: int,
        x_stride: int,
        out: int,
        threads: int,
        /,
    ) -> None: ...

class Attention:
    def __init__(
        self,
        norm: int,
        qkv: Dense,
        q_norm: int,
        k_norm: int,
        o: Dense,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        /,
    ) -> None: ...

class FeedForward:
    def __init__(self, norm: int, gate_up: Dense, down: Dense, eps: float, /) -> None: ...

class Experts:
    def __init__(self, experts: list[tuple[Dense, Dense]], /) -> None: ...
    def outputs(
        self,
        space: Workspace,
        x: int,
        rows: int,
        ids: int,
        per_token: int,
        out: int,
        threads: int,
        /,
    ) -> None: ...

class MixtureOfExperts:
    def __init__(
        self,
        norm: int,
        router: Dense,
        experts: Experts,
        per_token: int,
        normalize: bool,
        eps: float,
        /,
    ) -> None: ...

class KVCache:
    def __init__(
        self,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        type: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        /,
    ) -> None: ...

class Places:
    def __init__(
        self,
        tokens: int,
        positions: int,
        slots: int,
        tables: int,
        table_start: int,
        first_key: int,
        /,
    ) -> None: ...

class Stack:
    def __init__(self, cos: int, sin: int, half: int, /) -> None: ...
    def add_dense(self, attention: Attention, dense: FeedForward, /) -> None: ...
    def add_experts(self, attention: Attention, experts: MixtureOfExperts, /) -> None: ...
    def attend(
        self,
        index: int,
        space: Workspace,
        cache: KVCache,
        places: Places,
        x: int,
        x_stride: int,
        residual: int,
        out: int,
        threads: int,
        /,
    ) -> None: ...
    def feed_forward(
        self,
        index: int,
        space: Workspace,
        x: int,
        rows: int,
        residual: int,
        out: int,
        threads: int,
        /,
    ) -> None: ...
    def run(
        self,
        space: Workspace,
        cache: KVCache,
        places: Places,
        x: int,
        entry: int,
        entry_stride: int,
        taps: list[tuple[int, int]],
        read: int,
        reads_count: int,
        threads: int,
        /,
    ) -> None: ...
    def decode(
        self,
        space: Workspace,
        cache: KVCache,
        places: Places,
        ids: int,
        table: Dense,
        x: int,
        taps: list[tuple[int, int]],
        norm: int,
        eps: float,
        head: Dense,
        rows: int,
        count: int,
        out: int,
        read: int,
        reads_count: int,
        threads: int,
        /,
    ) -> None: ...

def rms_norm(
    space: Workspace,
    x: int,
    rows: int,
    width: int,
    stride: int,
    weight: int,
    eps: float,
    out: int,
    threads: int,
    /,
) -> None: ...
def silu_and_mul(
    space: Workspace, x: int, rows: int, width: int, out: int, threads: int, /
) -> None: ...
def rope(
    space: Workspace,
    x: int,
    tokens: int,
    heads: int,
    head_dim: int,
    stride: int,
    positions: int,
    cos: int,
    sin: int,
    half: int,
    out: int,
    threads: int,
    /,
) -> None: ...
def argmax(
    space: Workspace, x: int, rows: int, width: int, stride: int, out: int, threads: int, /
) -> None: ...
def top_k(
    space: Workspace,
    x: int,
    rows: int,
    width: int,
    stride: int,
    k: int,
    values: int,
    ids: int,
    threads: int,
    /,
) -> None: ...
def route(
    space: Workspace,
    logits: int,
    rows: int,
    count: int,
    per_token: int,
    normalize: bool,
    ids: int,
    weights: int,
    /,
) -> None: ...
def write_kv(
    space: Workspace,
    cache: KVCache,
    layer: int,
    slots: int,
    tokens: int,
    key: int,
    value: int,
    key_stride: int,
    value_stride: int,
    /,
) -> None: ...
def attention(
    space: Workspace,
    cache: KVCache,
    places: Places,
    layer: int,
    query: int,
    query_stride: int,
    heads: int,
    scale: float,
    out: int,
    threads: int,
    /,
) -> None: ...
def read_seconds(bytes: int, size: int, threads: int, path: str, /) -> float: ...
def int8_macs_per_second(rounds: int, threads: int, path: str, /) -> float: ...
def signal_seconds(rounds: int, /) -> float: ...
def float_macs_per_second(rounds: int, threads: int, path: str, /) -> float: ...
def draw_places(
    where: int,
    reals: int,
    words: int,
    count: int,
    places: int,
    threads: int,
    path: str,
    /,
) -> bytes: ...

class Recipe:
    """What a request asks of every draw. ``table``: the address of token ids by place, or 0."""

    def __init__(
        self,
        greedy: bool,
        temperature: float,
        floor: float,
        top_k: int,
        top_p: float,
        sharpening: float,
        key_low: int,
        key_high: int,
        sample: int,
        table: int,
        /,
    ) -> None: ...

def match_windows(
    windows: list[tuple[Recipe, int, tuple[int, ...], int]],
    logits: int,
    count: int,
    threads: int,
    path: str,
    /,
) -> list[tuple[int, ...]]: ...
def shm_segment_bytes(ranks: int, chunk_bytes: int) -> int: ...

class ShmGroup:
    """Addresses in; None, or what went wrong: (kind, members, own value, the other value)."""

    def __init__(
        self, fd: int, rank: int, ranks: int, chunk_bytes: int, spin_us: int, watch_fd: int
    ) -> None: ...
    def gather(
        self, src: int, nbytes: int, dst: int, tag: int, timeout_us: int, /
    ) -> tuple[str, list[int], int, int] | None: ...
    def reduce(
        self, src: int, count: int, dst: int, tag: int, timeout_us: int, /
    ) -> tuple[str, list[int], int, int] | None: ...
    def exchange(
        self, src: int, nbytes: int, dst: int, tag: int, timeout_us: int, /
    ) -> tuple[str, list[int], int, int] | None: ...
    def broadcast(
        self, data: int, nbytes: int, root: int, tag: int, timeout_us: int, /
    ) -> tuple[str, list[int], int, int] | None: ...
    def raise_abort(self, code: int) -> None: ...
    def abort_code(self) -> int: ...
    def processes(self) -> list[int]: ...
    def close(self) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...

class Sharing:
    def __init__(self, attention: bool, feed_forward: bool) -> None: ...
    def spread(
        self,
        norm: int,
        router: Dense,
        own: Experts | None,
        first: int,
        count: int,
        per_token: int,
        normalize: bool,
        eps: float,
    ) -> None: ...

def run_shared(
    stack: Stack,
    sharing: list[Sharing],
    space: Workspace,
    cache: KVCache,
    places: Places,
    x: int,
    entry: int,
    entry_stride: int,
    taps: list[tuple[int, int]],
    threads: int,
    tp: ShmGroup | None,
    ep: ShmGroup | None,
    shards: int,
    sum_tag: int,
    gather_tag: int,
    exchange_tag: int,
    timeout_us: int,
) -> tuple[int, tuple[str, list[int], int, int] | None]:
    """How many collectives came to their end, and None or what went wrong with the next."""
