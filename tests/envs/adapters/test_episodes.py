"""Episodes of an environment that leash does not play itself: found again, replayed, let go."""

import pytest

from envs.adapters.episodes import Episode, Episodes, Turn
from envs.tasks.task import Response, Reward, assistant, user


class Counting(Episodes):
    """A user who counts what was said; `drifts`: from a number that nobody knows."""

    names = ("said",)

    def __init__(self, at_once: int, *, drifts: bool = False) -> None:
        super().__init__(at_once=at_once)
        self._rows = {"train": [{"messages": [user(f"Go {i}")], "place": i} for i in range(6)]}
        self.drifts, self.log = drifts, []

    async def open(self, row):
        self.log.append(("open", row["place"]))
        return Count(self, row["place"], len(self.log) if self.drifts else 0)


class Count(Episode):
    def __init__(self, task, place, start):
        self.task, self.place, self.count = task, place, start

    async def answer(self, response):
        self.count += 1
        reward = Reward(float(self.count), {"said": 1.0}, False)
        return Turn([user(f"{self.count}")] if response.text != "end" else [], reward)

    async def close(self):
        self.task.log.append(("close", self.place))


def play(task, chats, text):
    """Say a text in each chat (place -> messages after the prompt); return rewards and answers."""
    rows = [task.rows("train")[place] for place in chats]
    responses = []
    for row, said in zip(rows, chats.values(), strict=True):
        said.append(assistant(text))
        system = [{"role": "system", "content": "Be brief."}]  # as policy.system_prompt adds it
        responses.append(Response(text, True, [*system, *row["messages"], *said]))
    rewards = task.rewards(rows, responses)
    for row, response, said in zip(rows, responses, chats.values(), strict=True):
        said += task.respond(row, response)
    return [reward.total for reward in rewards], [said[-1]["content"] for said in chats.values()]


@pytest.mark.parametrize("at_once", [1, 2, 6])
def test_fewer_open_episodes_than_chats_play_the_same_games(at_once):
    task, chats = Counting(at_once), {place: [] for place in range(6)}
    for turn in range(1, 4):
        assert play(task, chats, f"hm {turn}") == ([float(turn)] * 6, [str(turn)] * 6)
    assert play(task, chats, "end") == ([4.0] * 6, ["end"] * 6)
    opened = [place for what, place in task.log if what == "open"]
    assert sorted(opened) == sorted(place for what, place in task.log if what == "close")
    assert (len(opened) == 6) == (at_once == 6), "each chat is opened once where there is room"
    assert task.part_names() == ["said"]


def test_samples_of_a_prompt_that_say_the_same_have_an_episode_each():
    task = Counting(4)
    row = task.rows("train")[0]
    responses = [Response("a", True, [*row["messages"], assistant("a")]) for _ in range(3)]
    assert [r.total for r in task.rewards([row] * 3, responses)] == [1, 1, 1]
    after = [[*r.messages, *task.respond(row, r), assistant("b")] for r in responses]
    responses = [Response("b", True, messages) for messages in after]
    assert [r.total for r in task.rewards([row] * 3, responses)] == [2, 2, 2]
    assert task.log == [("open", 0)] * 3
    task.close()
    assert task.log[3:] == [("close", 0)] * 3


def test_an_environment_that_answers_otherwise_when_it_is_played_again_is_told():
    task, chats = Counting(1, drifts=True), {place: [] for place in range(2)}
    play(task, chats, "hm")
    with pytest.raises(ValueError, match="at most 1 chats"):
        play(task, chats, "hm")
