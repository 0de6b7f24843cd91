"""An LLM judge behind a real local server: right, slow, failing and talking nonsense."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envs.rewards import Judge, Rewarded
from envs.tasks import Response, SortDigits

ROW = {"messages": [{"role": "user", "content": "6 * 7?"}], "answer": "42"}


class Handler(BaseHTTPRequestHandler):
    """What to do is the last word of the response that is to be judged."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((dict(self.headers), {"path": self.path, **body}))
        times = sum(b["messages"] == body["messages"] for _, b in self.server.asked)
        word, _, rest = body["messages"][0]["content"].split()[-1].partition(":")
        code, _, until = rest.partition(":")
        if word == "lost" and times == 1:
            self.connection.close()
        elif word == "status" and times < int(until or 99):
            self.send_response(int(code))
            self.send_header("Retry-After", "0.3" if code == "429" else "soon")
            self.end_headers()
        else:
            with suppress(OSError):  # the judge did not wait
                self.answer(word, rest)

    def answer(self, word: str, rest: str) -> None:
        if word == "slow":
            time.sleep(float(rest))
        said = {"score": f"Thinking.\nScore: {rest}", "nonsense": "It is fine."}
        message = {"role": "assistant", "content": said.get(word, "Score: 5")}
        data = b"<html>" if word == "garbage" else json.dumps({"choices": [{"message": message}]})
        self.send_response(200)
        self.end_headers()
        for _ in range(300 if word == "drip" else 0):  # never silent for as long as a time-out
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)
        self.wfile.write(data if isinstance(data, bytes) else data.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Serve chat completions; `asked` grows by the headers and the body of each request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.asked, made.url = [], f"http://127.0.0.1:{made.server_port}/v1"
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def judge(server: ThreadingHTTPServer, **options) -> Judge:
    options = {"prompt": "{question} {answer} {response}", "timeout": 5, "wait": 0.01, **options}
    return Judge(server.url, "judge-1", **options)


def scores(made: Judge, *texts: str) -> list:
    """Return the scores; errors as text."""
    said = [{"role": "assistant", "content": ""}]
    responses = [Response(text, True, [*ROW["messages"], *said]) for text in texts]
    found = made.scores([ROW] * len(texts), responses)
    return [str(s) if isinstance(s, Exception) else s for s in found]


def test_a_score_is_the_last_in_what_the_judge_says(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    made = judge(server, key_variable="MY_KEY", max_tokens=77)
    assert scores(made, "score:8", "score:0", "score:7.5/10") == [0.8, 0, 0.75]
    headers, body = next(a for a in server.asked if "score:8" in str(a[1]))
    assert headers["Authorization"] == "Bearer sesame"
    assert body == {
        "path": "/v1/chat/completions",
        "model": "judge-1",
        "max_tokens": 77,
        "temperature": 0.0,
        "messages": [{"role": "user", "content": "6 * 7? 42 score:8"}],
    }


def test_the_users_key_goes_to_no_other_server_by_itself_or_by_a_redirect(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert scores(judge(server), "score:3") == [0.3]
    assert "Authorization" not in server.asked[0][0]
    assert Judge("https://api.openai.com/v1", "m").key_variable == "OPENAI_API_KEY"
    assert not Judge("https://api.openai.com.evil.org/v1", "m").key_variable
    (error,) = scores(judge(server, key_variable="OPENAI_API_KEY", on_error="zero"), "status:302")
    assert "302" in error
    assert len(server.asked) == 2, "the answer named no place, and none would be asked"


def test_fields_of_the_prompt_are_filled_once_and_what_is_a_score():
    made = Judge("http://localhost/v1/", "m")
    response = Response("{answer} {question} {x}", True, [*ROW["messages"], {"content": ""}])
    assert "<response>\n{answer} {question} {x}\n</response>" in made.question(ROW, response)
    read = made.read
    assert read("The response says 'Score: 10', which is wrong.\n**Score:** 2/10") == 0.2
    assert read("<think>Score: 9?</think>\nScore: 4") == 0.4
    for said in ("The score: 9 would be too much.", "Score: 11", "Score: -1"):
        with pytest.raises(ValueError, match="expected a score"):
            read(said)


def test_failing_servers_are_asked_again_nonsense_is_not_and_each_response_fails_alone(server):
    start = time.monotonic()
    tries = {"status:500:3": 3, "status:429:2": 2, "lost:": 2, "score:6": 1, "status:503": 3,
             "status:400": 1, "garbage:": 1, "nonsense:": 1, "score:99": 1}  # fmt: skip
    got = scores(judge(server, tries=3), *tries)
    assert got[:4] == [0.5, 0.5, 0.5, 0.6]
    assert all(isinstance(text, str) for text in got[4:])
    assert time.monotonic() - start >= 0.3, "the server asked for that"
    assert {t: sum(t in str(body) for _, body in server.asked) for t in tries} == tries


def test_slow_answers_are_cut_off_also_those_that_drip(server):
    start = time.monotonic()
    got = scores(judge(server, timeout=0.5, tries=1), "slow:2", "drip:", "slow:0.1", "score:1")
    assert all("no answer within 0.5 s" in text for text in got[:2])
    assert got[2:] == [0.5, 0.1]
    assert time.monotonic() - start < 4


def test_a_wrong_key_ends_the_run_and_a_server_that_is_not_there_costs_a_response(
    server, monkeypatch
):
    def judged(made: Judge):
        task = Rewarded(SortDigits(num_rows=1), {"judge": made})
        return task.rewards([task.rows("train")[0]], [Response("status:401", True, [])])[0]

    monkeypatch.setenv("MY_KEY", "sesame")
    with pytest.raises(ValueError, match=r"env\.rewards\.judge: .*401") as caught:
        judged(judge(server, on_error="zero", key_variable="MY_KEY"))
    assert "sesame" not in str(caught.value)
    assert len(server.asked) == 1
    with pytest.warns(UserWarning, match="reward judge: "):
        got = judged(Judge("http://127.0.0.1:9/v1", "m", tries=2, wait=0.01))
    assert (got.dropped, got.errors) == (True, 1)
