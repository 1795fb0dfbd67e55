"""Use a model on another server, which gets messages over HTTP. Its tokens and weights are not accessible.

    ChatModel (a GenerationInterface) ─► fields: request as JSON ─► connection: HTTP ─► server
                                      ◄─ answers: text, tool calls, numbers of tokens ◄──┘

The tokenizer of `chats` replaces the model's tokenizer. `check` tests the server before a run starts.
"""
