"""Lets the server act for a model: the loop that runs tools, and the process that runs them.

guest     code that runs inside a sandbox
host      the agent process: interpreters, shells, working directories and approvals
loop      rounds of generation and tool calls, in the frontends
fetch     web search, page extraction and files by URL, which reach public addresses only
store     files, skills and sessions that clients keep
"""
