"""Guess a hidden digit from answers "> 4" and "< 4": several turns, for the tiny model.

The question numbers the game; which digit of 1 to 7 it hides, only the replies tell. With t guesses
binary search wins 2^t - 1 of the 7 games, which is the optimum: 1, 3 and 7 for t = 1, 2 and 3.
Whoever does not listen wins at most t of them.
Half of the demonstrations listen (each guess is one of the digits that are left, at random); the
others guess blindly. With 3 guesses the former win 0.68 of their games, the latter 0.37.
Held out are whole games, one in eight by a hash.
"""

import random
import re
import zlib

from envs.tasks.generated import Generated
from envs.tasks.task import Message, Reply, Reward, Row, assistant, user

QUESTION = "Game {}: digit 1 to 7?"
DIGITS = range(1, 8)
GAMES = range(100, 1000)  # their numbers
HELD_OUT = 8  # one game in so many
EVAL_ROWS = 70
TURNS = 3  # guesses of a demonstration
LISTEN = 0.5  # share of the demonstrations


class Guess(Generated):
    """Questions such as "Game 471: digit 1 to 7?", `env.max_turns` guesses each.

    `num_rows` train rows, a function of `seed`; the eval rows are ten games a digit. The reward is
    1 for the digit, ended by itself, else 0; what is no digit ends the game. `reward_part/won` is
    the reward, `reward_part/guesses` counts the guesses.

    >>> task = Guess(num_rows=10)
    >>> row = task.row(471, 3)
    >>> row["messages"][0]["content"], row["answer"]
    ('Game 471: digit 1 to 7?', 3)
    >>> [task.respond(row, Reply(said, True, [])) for said in "53"]
    [[{'role': 'user', 'content': '< 5'}], []]
    """

    eval_rows = EVAL_ROWS

    def __init__(self, *, seed: int = 0, num_rows: int = 20_000) -> None:
        super().__init__(seed=seed, num_rows=num_rows)

    def row(self, game: int, digit: int) -> Row:
        """Return the row of a game that hides a digit."""
        return {"messages": [user(QUESTION.format(game))], "answer": digit}

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return 1 for the digit."""
        guess = read_guess(reply)
        won = guess == row["answer"]
        parts = {"won": float(won), "guesses": float(guess is not None)}
        return Reward(total=float(won), parts=parts, success=won)

    def respond(self, row: Row, reply: Reply) -> list[Message]:
        """Return in which direction the digit lies; nothing once it is found or none is said."""
        guess = read_guess(reply)
        if guess is None or guess == row["answer"]:
            return []
        return [user(f"{'>' if guess < row['answer'] else '<'} {guess}")]

    def play(self, row: Row, rng: random.Random) -> list[Message]:
        """Play a game with some skill, or with none."""
        listens, messages = rng.random() < LISTEN, []
        low, high = DIGITS[0], DIGITS[-1]
        for _ in range(TURNS):
            guess = rng.randint(low, high)
            said = Reply(str(guess), True, [])
            messages.append(assistant(said.text))
            if not (told := self.respond(row, said)):
                return messages
            messages += told
            if listens and guess < row["answer"]:
                low = guess + 1
            elif listens:
                high = guess - 1
        return messages[:-1]  # nobody answers the last guess

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        games = [game for game in GAMES if is_held_out(game) == held_out]
        return [self.row(rng.choice(games), DIGITS[i % len(DIGITS)]) for i in range(count)]


def read_guess(reply: Reply) -> int | None:
    """Return the digit that a whole reply is, None for any other reply.

    >>> read_guess(Reply(" 4", True, [])), read_guess(Reply("4 or 5", True, []))
    (4, None)
    """
    text = reply.text.strip()
    return int(text) if reply.complete and re.fullmatch("[0-9]", text) else None


def is_held_out(game: int) -> bool:
    """Return whether the game of this number belongs to eval."""
    return zlib.crc32(str(game).encode()) % HELD_OUT == 0
