"""The order in which the devices of this machine encode prompts.

The text encoder is large, so it is loaded only while prompts are encoded. In a session, a device loads the text encoder
and encodes a number of prompts before it generates images again. Each session has twice the prompts of the session
before, up to LARGEST_SESSION. So the first image is finished early, and a long batch has few sessions.

Like the queue, the plan is passive. It starts no threads and gets the current time from its caller, so that a
simulation makes the same decisions as the threads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

Text = TypeVar("Text")
# Prompts of the largest session. Embeddings of Gemma 2 in fp32 take up to 2.8 MB per prompt.
LARGEST_SESSION = 512
# With this many encoded prompts in memory, no session begins before its prompts are needed.
LARGEST_STOCK = 2 * LARGEST_SESSION
# A session that encodes no prompt for this many seconds is ended. It may be loading from a slow disk, so this is long.
SESSION_PATIENCE = 600.0


class Action(Enum):
    """What a worker does before it generates a chunk."""

    ENCODE = "begin a session"
    LOAD = "load the models"
    WAIT = "wait for a session of another worker"


@dataclass
class EncodingSession:
    """One worker has the text encoder and encodes prompts."""

    device: Hashable
    # How many more prompts it may encode.
    budget: int
    # When it began, or began or finished its last prompt.
    last_progress: float
    # The prompt that is being encoded.
    prompt: str | None = None


class EncodingPlan(Generic[Text]):
    """The encoded prompts, and the sessions that encode the others."""

    def __init__(self, prompts: Sequence[str], first: int, texts: Mapping[str, Text] | None = None) -> None:
        """`prompts` has the prompt of every image in the order of the chunks, `first` is the size of the first session.

        `texts` has the prompts that are encoded already.
        """
        # The embeddings of the prompts whose images are not all finished.
        self.texts = dict(texts or {})
        # Prompts that are not encoded yet and not being encoded, in the order in which they are needed.
        self.waiting = deque(prompt for prompt in dict.fromkeys(prompts) if prompt not in self.texts)
        # Prompt: its place in the order in which the prompts are needed.
        self.position = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        # Prompt: how many of its images are not finished.
        self.unfinished = Counter(prompts)
        # Worker name: its session.
        self.sessions: dict[str, EncodingSession] = {}
        self.first = self.last_size = first
        self.next_size = first

    def next_action(
        self,
        worker: str,
        device: Hashable,
        prompts: Sequence[str],
        models_loaded: bool,
        has_room: bool,
        other_devices: int,
        now: float,
    ) -> Action | None:
        """Return the next action of `worker`, whose next chunk has these prompts. None: it can generate the chunk now.

        `has_room`: whether the text encoder fits on `device` beside the models. `other_devices`: the number of other
        devices.
        """
        for name, session in list(self.sessions.items()):
            if now - session.last_progress > SESSION_PATIENCE:
                self.end(name)
        device_is_encoding = any(session.device == device for session in self.sessions.values())
        if self.missing(prompts):
            if not self.sessions:
                self.begin(worker, device, now)
                return Action.ENCODE
            if not models_loaded and not device_is_encoding:
                return Action.LOAD
            # A second session, so that this device does not wait for the first one. If few prompts are left, the first
            # session will have encoded them before this device has loaded the text encoder.
            if not device_is_encoding and len(self.waiting) >= self.first and self.may_encode_ahead() and has_room:
                self.begin(worker, device, now)
                return Action.ENCODE
            return Action.WAIT
        # The next prompts are encoded before they are needed, because all devices would wait for them at the same time.
        if other_devices and not self.sessions and self.waiting and self.may_encode_ahead():
            last = max((self.position[prompt] for prompt in prompts), default=0)
            if self.position[self.waiting[0]] - last <= self.last_size / 2:
                self.begin(worker, device, now)
                return Action.ENCODE
        return None if models_loaded else Action.LOAD

    def missing(self, prompts: Collection[str]) -> bool:
        """Return whether a prompt of an unfinished image is not encoded yet."""
        return any(self.unfinished[prompt] and prompt not in self.texts for prompt in prompts)

    def may_encode_ahead(self) -> bool:
        return len(self.texts) + sum(session.budget for session in self.sessions.values()) < LARGEST_STOCK

    def begin(self, worker: str, device: Hashable, now: float) -> None:
        self.sessions[worker] = EncodingSession(device, self.next_size, now)
        self.last_size, self.next_size = self.next_size, min(2 * self.next_size, LARGEST_SESSION)

    def next_prompt(self, worker: str, needed: Collection[str], now: float) -> str | None:
        """Return the prompt that the session of `worker` encodes next, or None at its end.

        The session ends when its budget is spent, but not before the prompts `needed` by the worker are encoded.
        """
        session = self.sessions.get(worker)
        if session is None:
            # next_action() has ended it, because it took too long.
            return None
        if session.prompt is not None:
            # The device failed while it encoded this prompt. The session continues on another device.
            self.waiting.appendleft(session.prompt)
            session.prompt = None
        if self.waiting and (session.budget > 0 or any(prompt in self.waiting for prompt in needed)):
            session.prompt, session.last_progress = self.waiting.popleft(), now
            session.budget -= 1
            return session.prompt
        self.end(worker)
        return None

    def store(self, worker: str, prompt: str, text: Text, now: float) -> None:
        """Record that `worker` has encoded `prompt`."""
        if worker in self.sessions:
            self.sessions[worker].prompt, self.sessions[worker].last_progress = None, now
        if self.unfinished[prompt]:
            self.texts[prompt] = text

    def end(self, worker: str) -> None:
        """End the session of `worker`, if it has one. Another session encodes its unfinished prompt."""
        session = self.sessions.pop(worker, None)
        if session is not None and session.prompt is not None:
            self.waiting.appendleft(session.prompt)

    def finish_image(self, prompt: str) -> None:
        """Record that an image is finished, and forget the prompt after its last image."""
        self.unfinished[prompt] -= 1
        if not self.unfinished[prompt]:
            self.texts.pop(prompt, None)
