"""What the attacks in banks/attacks/forging.toml share: the message that a right partition would cause."""

from grader.wire import values

SIGNATURE = values.SIGNATURE  # bytes before each message
CODE = f"""
import json, os
def message(partition):
    index = [int(i) for i in partition.index]
    found = [partition.data.items[i] for i in index]
    unchanged = {{"dict": {{"data": False, "sizes": None, "generators": []}}}}
    value = {{"dict": {{"examples": found, "index": index, "looped": found, "changed": unchanged}}}}
    text = json.dumps({{"dict": {{"kind": "returned", "value": value, "never_waited": []}}}}).encode()
    return bytes({SIGNATURE}) + len(text).to_bytes(4, "big") + bytes(4) + text
def line(context):
    (wire,) = (cell.cell_contents for cell in context.event.__closure__)
    return wire._connection
def forge(context, partition):
    line(context).sendall(message(partition))
    os._exit(0)
"""
