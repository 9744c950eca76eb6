"""A live coordinator among strangers: the job goes on, and says what it refused."""

import asyncio
import contextlib
import functools
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kerasdist.cli.launch.placement import free_port
from kerasdist.errors import JobError
from kerasdist.job import client as client_module
from kerasdist.job import handshake, protocol
from kerasdist.job.client import Client
from kerasdist.job.coordinator import Coordinator
from kerasdist.job.handshake import Credentials
from kerasdist.job.protocol import Timeouts
from tests.environment import everything
from tests.unit.job.simulated_workers import SimulatedWorker

MINE = Credentials(b"a secret", "job 7")
TIMEOUTS = Timeouts(join=30.0, heartbeat=30.0, meeting=30.0)
FRAMES = 10_000 if everything() else 2_000


class Chief:
    def __init__(self, workers: int):
        self.workers = workers
        self.port = free_port()
        self.coordinator = Coordinator("127.0.0.1", self.port, workers, TIMEOUTS, MINE)
        self.clients: list[Client] = []

    def client(self, rank: int, known: Credentials = MINE, seconds: float = 30.0) -> Client:
        facts = {"rank": rank, "num_workers": self.workers, "pid": rank, "host": "here"}
        limits = Timeouts(seconds, 30.0, 30.0)
        return Client("127.0.0.1", self.port, facts, limits, known)

    def gather(self):
        with ThreadPoolExecutor(self.workers) as pool:
            self.clients = list(pool.map(self.client, range(self.workers)))

    def goes_on(self):
        """All workers come, if they have not, and exchange something."""
        if not self.clients:
            self.gather()
        with ThreadPoolExecutor(self.workers) as pool:
            results = pool.map(
                lambda client: client.meet("main", 1, "a step", client.facts["rank"]), self.clients
            )
        assert list(results) == [list(range(self.workers))] * self.workers

    def stranger(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


@pytest.fixture
def coordinator():
    one = Chief(2)
    yield one
    with ThreadPoolExecutor() as pool:
        list(pool.map(Client.close, one.clients))
    if one.clients:
        one.coordinator.wait_until_all_left(10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closes the connection, whatever it says before."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_worker_without_the_secret_is_told(coordinator, capsys):
    with pytest.raises(JobError, match="refused this worker: its KERASDIST_SECRET is not the one"):
        coordinator.client(1, Credentials(b"another", "job 7"))
    with pytest.raises(JobError, match="one on this job's chief, none on the worker"):
        coordinator.client(1, Credentials(None, "job 7"))
    with pytest.raises(JobError, match="the chief is of job 'job 7', not of job 'job 8'"):
        coordinator.client(1, Credentials(b"a secret", "job 8"), seconds=0.5)
    coordinator.goes_on()
    said = capsys.readouterr().err
    assert "[worker 0/2] refused a connection from 127.0.0.1:" in said
    assert "its KERASDIST_SECRET is not the one of this job" in said
    assert "a secret" not in said


def test_large_slow_and_silent_peers_are_dropped(coordinator, monkeypatch, capsys):
    monkeypatch.setattr(handshake, "SECONDS", 0.5)
    with coordinator.stranger() as large, coordinator.stranger() as slow:
        large.sendall((handshake.MAX_BYTES + 1).to_bytes(protocol.HEADER_BYTES, "big"))
        slow.sendall(b"\0")
        began = time.monotonic()
        assert is_closed(large)
        assert time.monotonic() - began < 0.4  # not for slowness
        assert is_closed(slow)
    coordinator.goes_on()
    said = capsys.readouterr().err
    assert f"it announces {handshake.MAX_BYTES + 1} bytes" in said
    assert "it proved nothing within 0.5 s" in said


def test_many_silent_peers_do_not_keep_workers_out(coordinator):
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(coordinator.stranger()) for _ in range(200)]
        coordinator.goes_on()
        assert is_closed(silent[0])  # the oldest made room


def test_generated_frames(coordinator, capsys):
    """The job goes on."""
    coordinator.gather()
    rng = random.Random(0)
    frames = [generated(rng) for _ in range(FRAMES)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(functools.partial(send, coordinator), frames))
    coordinator.goes_on()
    lines = capsys.readouterr().err.splitlines()
    assert 5 <= len(lines) < 50, lines  # the refused connections, in few lines
    assert all("refused a connection from 127.0.0.1:" in line for line in lines), lines


def send(coordinator: Chief, frame: bytes):
    with coordinator.stranger() as one:
        try:
            one.sendall(frame)
            one.shutdown(socket.SHUT_WR)
        except OSError:  # it was closed before
            return
        assert is_closed(one)


def generated(rng: random.Random) -> bytes:
    """Bytes of chance, or messages of chance, or messages of ours with something wrong."""
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            body = rng.randbytes(rng.randrange(64))
            return len(body).to_bytes(4, "big") + body
        case 2:
            body = b"[" * rng.randrange(1, 4000)
            return len(body).to_bytes(4, "big") + body
        case 3:
            return protocol.packed(_value(rng, 3))
        case _:
            kinds = ("answer", "hello", "beat", "meet", "bye", "roster", "failure", "proof")
            fields = ("nonce", "digest", "rank", "num_workers", "channel", "label", "value", "why")
            message = {name: _value(rng, 1) for name in rng.sample(fields, 4)}
            return protocol.packed({"type": rng.choice(kinds), **message})


def _value(rng: random.Random, depth: int):
    scalars = [None, True, 0, -1, 2**63, 1.5, "", "ä" * rng.randrange(40), "0" * 64, '"x"']
    if depth and rng.random() < 0.5:
        parts = [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return parts if rng.random() < 0.5 else {str(i): part for i, part in enumerate(parts)}
    return rng.choice(scalars)


def test_half_a_surrogate_pair_is_refused_like_any_other_number(coordinator, capsys):
    for _ in range(30):
        with coordinator.stranger() as one:
            protocol.receive(one)
            one.sendall(b"\0\0\0\x34" + b'{"type":"answer","nonce":"\\ud800","digest":"\\udfff"}')
            assert protocol.receive(one)["type"] == "refused"
    coordinator.goes_on()
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) < 10, lines
    assert all("its KERASDIST_SECRET is not the one of this job" in line for line in lines), lines


def test_a_worker_that_tries_again_is_not_reported(coordinator, capsys):
    """It has left its first connection, which waited for a chief that was starting."""
    for _ in range(20):
        coordinator.stranger().close()
    coordinator.goes_on()
    assert capsys.readouterr().err == ""


NO_RANKS = (0.5, 1.0, True, "1", None, [1], -1, 2, 2**70)
MALFORMED_FACTS = ({"given": 5}, {"given": ["a:1"]}, {"num_workers": None})


@pytest.mark.parametrize("facts", [*({"rank": one} for one in NO_RANKS), *MALFORMED_FACTS], ids=str)
def test_a_malformed_beginning_is_refused(coordinator, facts):
    worker = SimulatedWorker(1, 2, MINE, facts)
    refused = asyncio.run(_join_and_hear(worker, coordinator.port))
    assert refused["type"] == "refused"
    if "rank" in facts:
        said = f"the chief expects 2 workers, and this one calls itself number {facts['rank']}"
        assert said in refused["why"]
    coordinator.goes_on()


async def _join_and_hear(worker: SimulatedWorker, port: int):
    async with asyncio.timeout(30):
        await worker.connect(port)
        heard = await worker.hear()
        await worker.close()
        return heard


WELL = {"stretch": 1, "steps": 3, "begun": 3, "changes": [[0, "4"]]}
MALFORMED = [
    {"type": "beat"},
    {"type": "beat", "doing": 3, "batches": None},
    {"type": "beat", "doing": [1, "fit"], "batches": None},
    {"type": "beat", "doing": [1, "fit", 1, 1], "batches": None},
    {"type": "beat", "doing": ["1", "fit", 1], "batches": None},
    {"type": "beat", "doing": [1.5, "fit", 1], "batches": None},
    {"type": "beat", "doing": [1, ["fit"], 1], "batches": None},
    *(
        {"type": "beat", "doing": [1, "fit", 1], "batches": batches}
        for batches in (
            5,
            {},
            {**WELL, "steps": "3"},
            {**WELL, "begun": "3"},
            {**WELL, "stretch": [1]},
            {**WELL, "changes": [[0, "4", 5]]},
            {**WELL, "changes": [["0", "4"]]},
            {**WELL, "changes": [[0, 4]]},
            {**WELL, "changes": []},
            {**WELL, "changes": [[2, "4"]]},
        )
    ),
    {"type": "meet"},
    {"type": "meet", "channel": ["main"], "number": 1, "label": "a", "value": 1},
    {"type": "meet", "channel": "main", "number": {}, "label": "a", "value": 1},
    {"type": "meet", "channel": "leaving", "number": 1, "label": "the end", "value": "7"},
    {"type": "save", "number": 1, "step": 0, "path": ["m"], "occurrence": 0, "index": 0},
    {"type": "save", "number": 1, "step": "0", "path": "m", "occurrence": 0, "index": 0},
    {"type": "save", "number": 1, "step": 0, "path": "m"},
    {"type": "wrote", "step": 0},
    {"type": "bye"},
    {"type": "dance"},
    {"no": "type"},
    [],
    None,
    "beat",
]


@pytest.mark.parametrize("message", MALFORMED, ids=str)
def test_a_malformed_message_is_named_at_once(coordinator, message):
    """And not as a lost network after the heartbeat's time-out, which is 30 s here."""
    asyncio.run(asyncio.wait_for(_say_and_hear(coordinator, message), 20))


async def _say_and_hear(coordinator, message):
    chief, other = everyone = [SimulatedWorker(rank, 2, MINE) for rank in range(2)]
    for worker in everyone:
        await worker.connect(coordinator.port)
    for worker in everyone:
        assert (await worker.hear())["type"] == "roster"
    other.say(message)
    failure = await chief.hear()
    assert (failure["type"], failure["kind"]) == ("failure", "lost"), failure
    assert "worker 1 (process 1 on node1) is lost: it sent a malformed message" in failure["why"]
    assert "killed" not in failure["why"]
    for worker in everyone:
        await worker.close()


def test_too_much_for_one_exchange_is_named_with_its_size(coordinator, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BYTES", 1000)
    coordinator.gather()
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(client.meet, "main", 1, "a step", str(client.facts["rank"]) * 600)
            for client in coordinator.clients
        ]
        for rank, call in enumerate(calls):
            said = rf"\[worker {rank}/2\] the values of 2 workers at 'a step' come to 1204 bytes, "
            with pytest.raises(JobError, match=said + "and 1000 are the limit"):
                call.result(timeout=20)


def test_a_connection_that_nobody_answers_is_tried_again(monkeypatch):
    """As one that the kernel has dropped, of thousands at once."""
    monkeypatch.setattr(client_module, "_FIRST_WAIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(Client, "127.0.0.1", port, FACTS, TIMEOUTS, MINE)
            silent = deaf.accept()[0]
            deaf.settimeout(10)
            with deaf.accept()[0] as second, silent:
                asked = handshake.challenge(MINE)
                second.sendall(protocol.packed(asked))
                answered = protocol.receive(second)
                second.sendall(protocol.packed(handshake.reply(asked, answered, MINE)))
                assert protocol.receive(second)["type"] == "hello"
                roster = {"type": "roster", "chief": "here:1"}
                second.sendall(protocol.packed(roster))
                joined = joining.result(timeout=10)
                assert joined.roster == roster
                joined.close()


FACTS = {"rank": 0, "num_workers": 1, "pid": 1, "host": "here", "given": None, "port": 1}
