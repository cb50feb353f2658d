"""The HTTP server: OpenAI's and Anthropic's interfaces, and a web page, in front of an AsyncEngine."""
