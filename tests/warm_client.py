"""The client of `tests/warm.py`: requests a process from the server and waits for its end. It is
copied beside the server's socket, below a `#!` line."""

import marshal
import os
import signal
import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
opened = []
for name in os.listdir("/dev/fd"):
    try:
        if os.get_inheritable(int(name)):
            opened.append(int(name))
    except OSError:  # the descriptor of this listing
        pass
asked = marshal.dumps(
    {
        "arguments": sys.argv[1:],
        "environment": dict(os.environb),
        "folder": os.getcwd(),
        "descriptors": opened,
    }
)
socket.send_fds(server, [len(asked).to_bytes(8, "big")], opened)
server.sendall(asked)
process = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(process, number))
for one in opened:  # readers of the output wait for the process only, not for this client
    os.close(one)
told = server.recv(4, socket.MSG_WAITALL)
code = int.from_bytes(told, "big", signed=True) if told else 1
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
