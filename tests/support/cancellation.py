"""A call that is cancelled after so many turns of the event loop."""

import anyio
import anyio.lowlevel


async def cancelled_after(steps, use):
    """Cancel *use* after so many turns of the event loop; True where it came to its end all the same."""
    finished = False

    async def run(scope):
        nonlocal finished
        with scope:
            await use()
            finished = True

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, scope)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        scope.cancel()
    return finished
