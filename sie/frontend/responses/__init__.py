"""OpenAI's responses: run, streamed, stored and read again."""
