"""Use a model that runs on another server.

It gets messages over HTTP, and its tokens and weights are not known here.

    ChatModel (a GenerationInterface) ─► fields: request as JSON ─► connection: HTTP ─► server
                                      ◄─ answers: text, tool calls, numbers of tokens ◄──┘

The tokenizer of `chats` takes the place of the model's tokenizer, and `check` asks the server before a run starts.
"""
