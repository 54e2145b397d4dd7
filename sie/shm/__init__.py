"""The memory that two processes share: segments, extents, rings of descriptors, attachments and pages.

    layout     the bytes, drawn                      segment   the operating system calls
    ring       order between two processes           pool      leases on the extents of one segment
    extent     header and arrays of one extent       large     payloads with a segment of their own
    space      all memory one side writes or reads   attach    one frontend-worker pair
    messages   what such a pair says on its socket   pages     counters, owned by the supervisor
    inflight   what a worker is running, likewise

It knows descriptors and bytes; it never knows a model, a dialect or a schedule.
"""
