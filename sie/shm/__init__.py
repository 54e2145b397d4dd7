"""Memory shared between two processes: segments, extents, rings of descriptors, attachments and pages.

    layout     the bytes, drawn                      segment   the operating system calls
    ring       order between two processes           pool      leases on the extents of one segment
    extent     header and arrays of one extent       large     payloads with their own segment
    space      all memory one side writes or reads   attach    one frontend-worker pair
    attach_messages  messages on the pair's socket   pages     counters, owned by the supervisor
    inflight   a worker's running requests; the supervisor owns this page too

It handles descriptors and bytes only, never models, dialects or schedules.
"""
