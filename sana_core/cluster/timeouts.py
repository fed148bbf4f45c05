"""The timeouts and intervals of a run on a cluster, in seconds."""

# Connecting a driver to the head, which may be busy. If there is no head, Ray itself would try for longer.
CONNECT_TIMEOUT = 40.0
# Connecting Ray Client. The head starts a process for the client, slowly if it is busy. If there is no head, Ray gives
# up after 30 s.
CLIENT_TIMEOUT = 120.0
# A call of Ray. No call takes this long while the head is alive. Ray itself gives up after 90 s.
CALL_TIMEOUT = 40.0
# The first call on a connection that was idle.
PROBE_TIMEOUT = 5.0
# How long a server keeps idle actors after a run. They keep their GPUs and their loaded models.
ACTOR_IDLE_TIMEOUT = 300.0
# How long a run waits for a GPU: longer than idle actors of another run keep it.
GPU_TIMEOUT = 2 * ACTOR_IDLE_TIMEOUT
# How long Ray may take to place an actor on a machine, before another machine is requested too.
PLACEMENT_TIMEOUT = 10.0
# How long an actor may be silent before it counts as hung, when it is ready and while it loads from a slow disk.
ACTOR_TIMEOUT, LOADING_TIMEOUT = 30.0, 300.0
# The time between two calls of a poll, and between two checks of the machines and actors.
POLL_INTERVAL, HEALTH_CHECK_INTERVAL = 0.5, 3.0
