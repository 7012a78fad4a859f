"""Explains crashes of a student's code where neither torch's words nor Python's say what to change.

A row's words are searched in the whole message: type, text, file, and the student's last lines. ` ... ` means anything
in between. The first row that fits counts. A lesson's test file has its own rows in a table CRASHES, which come first.
"""

import re
from collections.abc import Mapping

BETWEEN = " ... "
KNOWN = {
    "cannot assign to field": "this object cannot be changed: pass what differs between workers as an argument",
    "has no attribute 'set_epoch'": "set_epoch is a method of the sampler, not of the loader",
    "sampler option is mutually exclusive with shuffle": "the sampler already decides the order: pass the loader a "
    "sampler or shuffle=True, not both",
    "Invalid rank ... rank should be in the interval": "the sampler was given a rank that does not exist: the number "
    "of workers comes first, then the rank",
    "batch_size=<torch.utils.data ... Sampler": "the second positional argument of DataLoader is batch_size, the "
    "third is shuffle: pass the sampler by name, sampler=",
    "Expected timeout argument to be of type datetime.timedelta": "the second and third positional arguments of "
    "init_process_group are its address and its timeout, a timedelta: pass rank= and world_size= by name",
    "AllreduceOptions ... ReduceOp": "the second positional argument of all_reduce is op, for instance "
    "dist.ReduceOp.SUM: pass a group or async_op by name",
    "group argument must be None": "the first positional argument of Process is group: pass target= and args= by name",
    "path should be string, bytes ... Config": "from_pretrained needs a name or a folder as its first argument: pass "
    "the configuration as config=",
    "output_device arguments only work": "the model is on the CPU, where DistributedDataParallel takes no list of "
    "devices: pass one only on a GPU",
    "for /: 'NoneType' ... all_reduce": "dist.all_reduce returns None: it works in place, so do not use its result",
    "for /=: 'NoneType'": "the gradient is None: a collective works in place and returns None, so do not assign its "
    "result; and leave out parameters without a gradient",
    "got <class 'NoneType'>": "a collective was given None instead of a tensor: leave out parameters that have no "
    "gradient (param.grad is None)",
    "must be Tensor, not NoneType": "None stands where torch needs a tensor: leave out parameters that have no "
    "gradient (param.grad is None)",
    "'NoneType' object has no attribute 'wait'": "wait() is called on None: a call returns a handle only with "
    "async_op=True, so pass it, and keep the handle",
    "'tuple' object has no attribute 'wait'": "wait() is called on a tuple: keep only the handle that the call returns",
    "for +=: 'NoneType' and 'Tensor'": "the left side of += is None, because there is nothing to add to yet: the first "
    "time, store the tensor itself",
    "'NoneType' object has no attribute 'parameters'": "the model is None: a function that works in place returns "
    "None, so do not assign its result to the model",
    "dtypesFound": "the tensors of one call have different dtypes: make a buffer like the gradient that it is for "
    "(torch.empty_like)",
    "leaf Variable that requires grad": "a parameter is changed in place while autograd records: write to it inside "
    "torch.no_grad()",
    "attempting to assign a gradient with dtype": "param.grad keeps the dtype of its parameter: convert a tensor of "
    "another dtype before you assign it",
    "assigned grad has data of": "param.grad keeps the dtype of its parameter: convert a tensor of another dtype "
    "before you assign it",
    "positional arguments but 3 were given ... from_pretrained": "pass the configuration to from_pretrained by name, "
    "config=",
    "'Tensor' object is not callable ... optimizer.step(": "optimizer.step takes no loss: the gradients are in the "
    "parameters, so call it without arguments",
    "Port could not be cast to integer value as '{": "the address still has its braces: a text with values in braces "
    "begins with f",
    "'NoneType' object has no attribute 'item'": "the loss is None: a function that works in place returns None, so do "
    "not assign its result",
    "str expected, not int ... environ": "environment variables are texts: write the port as a string",
    "'tuple' object does not support item assignment": "split() and chunk() return a tuple, and a tuple cannot be "
    "changed: make a list of it",
    "Boolean value of Tensor": "a tensor stands where a condition is needed; `in`, == and list.index compare values, "
    "too: write `param.grad is None`, and look parameters up in a dict or a set",
    "is not a Module subclass ... Sequential(": "nn.Sequential takes modules, each as an argument of its own: unpack a "
    "list or a generator of them with *",
    "save_for_backward can only save variables": "ctx.save_for_backward takes only tensors: keep anything else as an "
    "attribute, ctx.name = ...",
    "'NoneType' object is not subscriptable": "None is indexed here: a function that works in place, such as "
    "random.shuffle or list.sort, returns None, so do not assign its result",
    "len() of a 0-d tensor": "len(tensor) is only the size of its first dimension: numel() is the number of elements",
    "not in list ... .index(": "list.index(x) searches for the value x and returns its place: for the value at place "
    "x, use brackets",
    "can only join a started process": "a process was never started: call start(), not run(), before you join it",
    "'function' object is not": "a function is used where its result is needed: call it, with parentheses",
    "'method' object is not": "a method is used where its result is needed: call it, with parentheses",
    "'NoneType' object has no attribute": "None stands where an object is needed: start(), append() and the like "
    "return None, so keep the object itself; and param.grad is None where there is no gradient",
}


def cause_of(text: str, known: Mapping[str, str]) -> str:
    """Return why a run crashed with this message; "" if it is not known. A lesson's own row comes before ours."""
    return find(text, known) or find(text, KNOWN)


def find(text: str, known: Mapping[str, str]) -> str:
    """Return the words of the first row whose signs are in the message; "" if there is none."""
    return next((words for signs, words in known.items() if _fits(text, signs)), "")


def _fits(text: str, signs: str) -> bool:
    """Return whether all signs are in the text, in their order."""
    return bool(re.search(".*".join(map(re.escape, signs.split(BETWEEN))), text, re.DOTALL))
