"""What the tests of the KL transforms share: a tiny policy, its rows, and slow scores of them."""

import torch
from tensordict import TensorClass, TensorDict, lazy_stack
from torch import Tensor, nn

from envs.env import EnvBase
from envs.transforms.ragged import get_values

V, T = 11, 6
FULL, REF = ("log_probs", "full"), ("ref_log_probs", "full")


class TinyPolicy(nn.Module):
    """A language model over the running mean of embeddings, behind the interface of a wrapper."""

    def __init__(self, seed=0, *, key="log_probs", mode="tokens", padded=True, generate=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.double()
        self.log_probs_key, self.input_mode, self.pad_output = key, mode, padded
        self.generate, self.return_log_probs, self.in_keys = generate, True, [(mode, "full")]
        self.seed, self.calls, self.tokenizer = seed, 0, None

    def get_new_version(self, **changes):
        self.asked = changes
        made = TinyPolicy(self.seed, key=changes["log_probs_key"], padded=changes["pad_output"])
        made.input_mode, made.in_keys = changes["input_mode"], [changes["input_key"]]
        return made

    def score(self, ids: Tensor) -> Tensor:
        """[t] ids without padding -> [t] log-probs, the first is 0."""
        count = torch.arange(1, len(ids) + 1).unsqueeze(-1)
        table = self.head(self.embed(ids).cumsum(0) / count).log_softmax(-1)  # [t, V]
        known = table[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        return torch.cat([known.new_zeros(1), known])

    def forward(self, td):
        """Score tokens.full in place, as wrappers do."""
        self.calls += 1
        ids = get_values(("tokens", "full"), td)
        if isinstance(ids, list):
            lps = [self.score(r) for r in ids]
        else:
            masks = get_values(("masks", "all_attention_mask"), td)
            lps = [torch.zeros(ids.shape[1]).double() for _ in ids]
            lps = [
                z.masked_scatter(m, self.score(r[m]))
                for z, r, m in zip(lps, ids, masks, strict=True)
            ]
        if self.pad_output and not isinstance(ids, list):
            td.set((self.log_probs_key, "full"), torch.stack(lps))
        elif isinstance(ids, list):
            td.set(self.log_probs_key, lazy_stack([TensorDict(full=lp) for lp in lps]))
        return td


def mask(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


ATTENTION = mask("111111", "001111")  # left-padded
ASSISTANT = mask("011011", "000111")
RESPONSE = mask("000011", "000110")
IDS = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(0)) * ATTENTION


def dense(*, response=True, assistant=True, nxt=True, **more) -> TensorDict:
    masks = {"all_attention_mask": ATTENTION}
    masks |= {"all_assistant_mask": ASSISTANT} if assistant else {}
    masks |= {"all_response_mask": RESPONSE} if response else {}
    td = TensorDict({"tokens": {"full": IDS}, "masks": masks, **more}, batch_size=[2])
    return td.set("next", TensorDict(batch_size=[2])) if nxt else td


def ragged(**more) -> TensorDict:
    """The same rows without padding, in a lazily stacked td."""
    rows = [
        TensorDict({("tokens", "full"): IDS[i][m], ("masks", "all_response_mask"): RESPONSE[i][m]})
        for i, m in enumerate(ATTENTION)
    ]
    for i, row in enumerate(rows):
        row.set("next", TensorDict({k: v[i] for k, v in more.items()}))
    return lazy_stack(rows)


def slow_scores(model: TinyPolicy, keep: Tensor) -> Tensor:
    """Score by one forward per token over its prefix, [2, T], 0 outside keep."""
    out = torch.zeros(2, T).double()
    with torch.no_grad():
        for b in range(2):
            prefix: list[int] = []
            for t in range(T):
                if ATTENTION[b, t]:
                    if prefix and keep[b, t]:
                        state = model.embed.weight[prefix].mean(0)
                        logits = model.head.weight @ state + model.head.bias
                        out[b, t] = logits[IDS[b, t]] - logits.exp().sum().log()
                    prefix.append(int(IDS[b, t]))
    return out


class Shorter:
    """A tokenizer whose renderings have one token less."""

    def apply_chat_template(self):
        raise NotImplementedError


class Turns(TensorClass["nocast"]):
    """A history of one "question>answer" text per row; a character is a token."""

    text: list

    def apply_chat_template(self, *, tokenizer, return_assistant_tokens_mask, **_):
        assert return_assistant_tokens_mask
        rows = [
            torch.tensor([0] * (t.index(">") + 1) + [1] * len(t.split(">")[1])) for t in self.text
        ]
        if isinstance(tokenizer, Shorter):
            rows = [r[1:] for r in rows]
        return lazy_stack([TensorDict(assistant_masks=r) for r in rows])


class Chat(EnvBase):
    def _reset(self, td):
        return td

    def _step(self, td):
        return TensorDict({"reward": torch.ones(2, 1).double()}, [2])


class Collector:
    def __init__(self, policy):
        self.policy = policy
