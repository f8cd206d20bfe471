"""Pure-torch algorithms on tensors: no asyncio, sockets, files or clock."""
