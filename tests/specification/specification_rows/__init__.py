"""The rows of the specification: S0 to S4 are its pages, and there is the card."""

from specification_rows import kl_reward, token_dists, wrapper
from specification_rows.card import CARD
from specification_rows.containers import S1
from specification_rows.distributions import S0, S2
from specification_rows.kl import S3
from specification_rows.rollout import S4

MORE = (wrapper, token_dists, kl_reward)  # their rows are those of S1 and S3
ROWS = [row for page in (S0, S1, S2, S3, S4, CARD) for row in page.found]
