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

def rms_norm(
    x: int, rows: int, width: int, stride: int, weight: int, eps: float, out: int, path: str, /
) -> None: ...
def silu_and_mul(x: int, rows: int, width: int, out: int, threads: int, path: str, /) -> None: ...
def rope(
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
    path: str,
    /,
) -> None: ...
def attention(
    query: int,
    key: int,
    value: int,
    key_stride: int,
    value_stride: int,
    keys: int,
    values: int,
    kv_type: str,
    positions: int,
    slots: int,
    tables: int,
    table_start: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    first_key: int,
    scale: float,
    out: int,
    threads: int,
    path: str,
    /,
) -> None: ...
def write_kv(
    key: int,
    value: int,
    key_stride: int,
    value_stride: int,
    keys: int,
    values: int,
    kv_type: str,
    slots: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    path: str,
    /,
) -> None: ...

def draw_places(
    where: int,
    reals: int,
    words: int,
    count: int,
    places: int,
    threads: int,
    path: str,
    /,
) -> None: ...
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
