"""The settings of a run: one frozen dataclass per section of the TOML file.

A leaf of the package, free of torch, so that `--help`, tests and supervisors read settings quickly. The options of a codec or an exchange
are not here but beside its class; `RunConfig.codec` and `RunConfig.exchange` hold whichever dataclass the name selects. Reading files and
the command line is the job of `toml.py` and `command_line.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from thinwire.config.registry import EXCHANGES

Device = str
"""auto, cpu, cuda, cuda:1, xpu, mps, or another device of torch."""
Dtype = Literal["fp32", "bf16", "fp64"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder."""

    architecture: str = "llama"
    """Family of decoders: llama (which takes every ingredient below), mistral, qwen2, qwen3, or one of another package."""

    vocabulary: int = 4096
    """Token types, V."""
    width: int = 256
    """Model width, D."""
    layers: int = 8
    """Decoder blocks."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """Key/value heads (grouped-query attention); divides `heads`."""
    head_dim: int | None = None
    """Width of a head; unset: `width` / `heads`."""
    ffn: int = 704
    """Hidden width of the FFN, F."""
    ffn_kind: Literal["swiglu", "relu2"] = "swiglu"
    """FFN: `swiglu`, gated, or `relu2`, the square of a ReLU without a gate."""
    context: int = 128
    """Tokens per sequence, T."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    rope_kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    """How rotary frequencies are scaled for sequences longer than `rope_context`, by the names that Hugging Face gives."""
    rope_factor: float = 1.0
    """By how much scaled rotary positions stretch a sequence."""
    rope_context: int | None = None
    """Sequence length that the unscaled frequencies were trained on; unset: `context`."""
    rope_slow: float = 1.0
    """llama3 and yarn: frequencies of at most so many turns within `rope_context` are divided by `rope_factor`."""
    rope_fast: float | None = None
    """llama3 and yarn: frequencies of at least so many turns stay as they are; unset: 4 (llama3), 32 (yarn)."""
    rope_attention_factor: float | None = None
    """yarn: cosine and sine are multiplied by this; unset: 0.1 ln(`rope_factor`) + 1."""
    rope_truncate: bool = True
    """yarn: round the ends of the ramp between slow and fast to whole frequencies."""
    window: int | None = None
    """Tokens that attention sees, the own one included (sliding window); unset: all before it."""
    window_layers: str | None = None
    """Layers with that window, such as 0-3,6; unset: all."""
    qk_norm: Literal["none", "gains", "plain"] = "none"
    """RMSNorm of each head's queries and keys: with gains, as Qwen3 has it, or `plain`, without."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases on the query, key and value matrices of attention, or on its output matrix too."""
    ffn_bias: bool = False
    """Biases on all matrices of the FFN."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    free_layers: int | None = None
    """Last layers that a constraining codec leaves alone; unset: the layers of the last stage when the run starts."""
    dropout: float = 0.0
    """Dropout inside each branch, before its output matrix. Any codec."""
    output_dropout: float = 0.0
    """Dropout on each branch's output. Leaves the subspace."""
    output_bias: bool = False
    """Biases on the output matrices of both branches; K wide in a subspace."""
    norm_reorder: bool = False
    """RMSNorm without gains behind each branch, in place of the norm in front of it."""
    branch_norm_gains: bool = False
    """RMSNorm with gains on each branch's output. Leaves the subspace."""
    tied_head: bool = False
    """Use the embedding as output head. Leaves the subspace."""
    separator: int | None = None
    """Token that ends a document: attention does not cross it, positions begin anew behind it; unset: a window is read as one text."""
    zero_outputs: bool = False
    """Begin with zeros in the output matrices of both branches and in the head."""
    fused_loss: bool = False
    """Compute head and loss together, in chunks, so that no logits of a whole microbatch are in memory. Changes the last bits."""
    logit_cap: float = 0.0
    """Soft cap c of the logits: x becomes c x / sqrt(x^2 + c^2); 0 turns it off."""

    @cached_property
    def head_size(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA: the weights of an imported model stay as they are, and thin matrices beside them are trained."""

    rank: int = 0
    """Rank of the thin matrices; 0: no adapter, all weights are trained."""
    targets: str = "q_proj,v_proj"
    """Linear layers that get an adapter, by their Hugging Face names with commas, or `all-linear`."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by `alpha` / `rank`."""
    dropout: float = 0.0
    """Dropout of what an adapter reads."""
    base_format: Literal["full", "bf16", "int8"] | None = None
    """How frozen matrices are held: full (as they are computed with), bf16, or int8 with a scale per row; unset: bf16 if the folder is."""
    base: str = ""
    """SHA-256 of the frozen weights; `thinwire import` writes it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "stdlib"
    """`stdlib`, a text file or glob, a glob of `.bin` token shards, or `hf:NAME[:CONFIG]`; several with weights: 'a.txt:2,b/*.txt:1'."""
    tokenizer: str = "train"
    """`train` (byte-level BPE on the source, cached), a `tokenizer.json`, or `hf:NAME`."""
    text_column: str = "text"
    """Column of a Hugging Face dataset that holds the text."""
    max_tokens: int = 50_000_000
    """Most tokens taken from the source for each split."""
    buffer: int | None = None
    """Windows to draw from while a text or dataset streams by; unset: it is tokenised first, and drawn from as a whole."""
    cache: str = "~/.cache/thinwire"
    """Folder for trained tokenizers and token files."""
    loss: Literal["all", "completions"] = "all"
    """Tokens that count in the loss. `completions`: the source is JSON lines, or a dataset, of prompt and completion or of messages."""
    everywhere: bool = False
    """Every stage reads the data itself, so that no token ids have to cross the boundaries."""

    @property
    def marked(self) -> bool:
        """Tell whether ids say which of them count in the loss."""
        return self.loss == "completions"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, precision and optimizer of a run."""

    steps: int = 600
    """Optimizer steps."""
    seconds: float | None = None
    """Stop after this much training time even if steps remain."""
    batch: int = 16
    """Sequences per step, of all replicas together."""
    dtype: Dtype = "fp32"
    """Compute precision: fp32, bf16 (autocast over fp32 weights) or fp64."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    optimizer: Literal["shared", "adamw", "muon"] = "shared"
    """`shared`: AdamW whose second moment is shared along the subspace axis; `adamw`: elementwise; `muon`: Muon on matrices."""
    rate: float = 3e-3
    """Peak learning rate."""
    muon_rate: float = 0.02
    """Peak learning rate of the matrices that Muon updates."""
    muon_warmup: int = 0
    """Steps over which Muon's momentum grows from 0.85 to 0.95; 0: it is 0.95 from the start."""
    embedding_rate: float | None = None
    """Peak learning rate of the embedding; unset: `rate`."""
    head_rate: float | None = None
    """Peak learning rate of the head; unset: `rate`."""
    vector_rate: float | None = None
    """Peak learning rate of norms and biases; unset: `rate`."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices (not of norms, biases and embeddings)."""
    ema: float = 0.0
    """Decay of a running mean of the weights, which `thinwire export --ema` writes; 0: none is kept."""
    warmup: int = 50
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine"] = "linear"
    """After the warm-up: constant, then `linear` over the last part (`decay`); or half a `cosine` over all steps."""
    decay: float = 0.2
    """Last share of the steps over which the rate falls linearly to its floor."""
    floor: float = 0.0
    """Share of the peak rate to which it falls."""
    checkpoint_every: int = 200
    """Steps between checkpoints, besides a first one after 10 steps or a minute; 0: only at the end."""
    validate_every: int = 100
    """Steps between validations; 0: only at the end."""
    validation_sequences: int = 256
    """Sequences per validation."""
    stuck_seconds: float = 60.0
    """A worker whose calculation does not end for this long, and for 20 times as long as others of its kind took, is replaced."""
    threads: int = 1
    """Torch threads of each process; 0 leaves torch's choice. Another number changes the last bits of the results."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the model is cut and fed."""

    stages: int = 4
    """Pipeline stages, S."""
    split: str | None = None
    """Layers per stage, such as 2,2,3,1; unset: as even as possible, earlier stages take the remainder."""
    microbatches: int = 8
    """Microbatches per step and replica, M; divides a replica's share of `train.batch`."""
    mode: Literal["inprocess", "workers"] = "workers"
    """One worker process per stage, or all stages in this process."""
    schedule: Literal["auto", "depth", "1f1b", "gpipe"] = "auto"
    """Order of the microbatches in workers: `auto` and `depth` hide the measured latency of the links."""
    engine: Literal["auto", "torch", "own"] = "auto"
    """What runs them: torch's pipeline engine or our own, to the same bits; `auto`: torch's where the installed release has what we use."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """The path between workers."""

    profile: str = "open"
    """Named link profile to emulate between workers, or one such as 20mbps_30ms; `open` emulates nothing."""
    pace_mbps: float | None = None
    """Most Mbit/s a worker sends on a link; unset: no limit."""
    ping_seconds: float = 1.0
    """Time between heartbeats."""
    silent_seconds: float = 10.0
    """A connection without any byte for this long is given up."""
    reconnect_seconds: float = 60.0
    """A link without a connection for this long fails the run."""
    standby_seconds: float = 30.0
    """A neighbour that is away for this long is replaced by a standby of the roster, if there is one."""


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """Copies of the pipeline on different data."""

    count: int = 1
    """Replicas, R; each takes `train.batch` / R sequences of a step."""
    graph: str = "complete"
    """Which replicas are joined: complete, ring, torus, or edges such as 0-1,1-2; gossip takes weights too: 0-1:0.25,1-2:0.25."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How much memory a stage may use on this machine."""

    budget: str | None = None
    """Most memory of each stage here, such as 2GB or 1.5GiB: what does not fit is recomputed or offloaded. Unset: no limit."""
    folder: str | None = None
    """Folder for what a CPU stage offloads, on a fast disk; unset: the run folder."""


def default_exchange() -> Any:
    """Return the options of an exchange that loses nothing."""
    return EXCHANGES.load("allreduce").Options(name="allreduce")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    seed: int = 0
    """Seed of weights, data order, basis, dropout and stochastic rounding."""
    device: Device = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, xpu, mps, or another of torch. Workers of one machine take one card each."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    codec: Any = None
    """The chosen codec's options (a `codecs.base.Options` dataclass)."""
    link: LinkConfig = field(default_factory=LinkConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    exchange: Any = field(default_factory=default_exchange)
    """The options of the chosen exchange between replicas (a `replicas.exchange.ExchangeOptions` dataclass)."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @cached_property
    def replica_batch(self) -> int:
        """Return the sequences of a step that one replica takes."""
        return self.train.batch // self.replicas.count

    @cached_property
    def microbatch(self) -> int:
        """Return the sequences of one microbatch."""
        return self.replica_batch // self.pipeline.microbatches
