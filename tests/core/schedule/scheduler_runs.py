"""A scheduler with requests, and a run to the end."""

from .device import FakeDevice, run_step, scheduler_of


def running_of(*requests, policy=None, **changes):
    scheduler = scheduler_of(policy, **changes) if policy else scheduler_of(**changes)
    for request in requests:
        scheduler.submit(request)
    return scheduler, FakeDevice(changes.get("page_size", 4))


def finish(scheduler, device, token=1):
    """Run to the end. Returns {request id: (output, reason)}."""
    ended = {}
    while scheduler.has_work:
        for result in run_step(scheduler, device, token)[1]:
            if result.finish_reason:
                output = list(result.request.token_ids[result.request.num_prompt_tokens :])
                ended[result.request.request_id] = output, result.finish_reason
    scheduler.check_idle()
    return ended
