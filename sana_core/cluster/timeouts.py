"""How long a run on a cluster waits, in seconds."""

# for the head, which may be busy; Ray's own attempts take longer where nobody answers
CONNECT_TIMEOUT = 40.0
# for a head to start the process that serves a client, which a busy one does slowly; Ray gives up after 30 where nobody
# answers
CLIENT_TIMEOUT = 120.0
# no call of Ray's takes so long while its head lives; Ray itself gives up after 90
CALL_TIMEOUT = 40.0
# for a connection that was idle to answer
PROBE_TIMEOUT = 5.0
# that a server keeps its actors after a run, each with its GPU and what it has loaded
ACTOR_IDLE_TIMEOUT = 300.0
# for a GPU, longer than the actors of another run stay idle
GPU_TIMEOUT = 2 * ACTOR_IDLE_TIMEOUT
# for Ray to place an actor, before it is asked for on another machine too
PLACEMENT_TIMEOUT = 10.0
# for an actor's answer before it counts as hung; while it loads, a slow disk may keep it
ACTOR_TIMEOUT, LOADING_TIMEOUT = 30.0, 300.0
# between two calls of a poll, and two looks at the machines and whether actors answer
POLL_INTERVAL, HEALTH_CHECK_INTERVAL = 0.5, 3.0
