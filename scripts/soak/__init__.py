"""Hours of conversations with aborts, lost clients, and donors that come, go, hang and die.

    PYTHONPATH=scripts:test python -m soak                    # an hour
    PYTHONPATH=scripts:test python -m soak --seconds 300

A tiny model on the CPU engine. Every answer is compared with what the same server answered before
anything happened. Every second the books are checked, those of the server against those of the
donors; SGLang's own checks of the device pool run at every step of the scheduler. At the end
nothing may be in use, memory and descriptors must not have grown, and a calm round must cost the
server no more than one at the start.
"""
