"""Owns the memory that two processes share: segments, extents, rings of descriptors, attachments and pages.

    layout    the bytes, drawn                 segment   the operating system calls
    ring      order between two processes      pool      leases on extents of one segment
    extent    header and arrays of an extent   large     payloads with a segment of their own
    attach    one frontend-worker pair         pages     counters and in-flight work, owned by the supervisor

It knows descriptors and bytes; it never knows a model, a dialect or a schedule.
"""
