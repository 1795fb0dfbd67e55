"""Handle messages of conversations: their content, rendering by chat templates, spans of turns, and control tokens."""
