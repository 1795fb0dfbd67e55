"""Put this folder, with its helpers, on the import path of the tests in the folders below."""
