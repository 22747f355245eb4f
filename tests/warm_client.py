"""What asks the server of `tests/warm.py` for a process and waits for its end; it stands below a
line that names Python, in the folder of that server's socket."""

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
    except OSError:  # it was that of the folder
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
for one in opened:  # whoever reads what the process writes waits for its end alone
    os.close(one)
told = server.recv(4, socket.MSG_WAITALL)
code = int.from_bytes(told, "big", signed=True) if told else 1
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
