"""Wire formats of files, skills and sessions, in the forms of OpenAI's and Anthropic's API."""
