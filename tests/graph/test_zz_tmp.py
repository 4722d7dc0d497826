import sys, torch
sys.path.insert(0,'tests'); sys.path.insert(0,'tests/graph')
import commpass; print(commpass.__file__)
from graphs import ops
import test_fuse
from test_fuse import RANKS, before, forced, run, roles_of
import pytest
BF16=torch.bfloat16
X=torch.empty(256,1024,dtype=BF16); W=torch.empty(512,1024,dtype=BF16); B=torch.empty(512,dtype=BF16)
wait=ops.wait_tensor
def f(x,w,b):
    y=wait(ops.all_gather_into_tensor(x,RANKS,"0"))
    return [torch.nn.functional.linear(y,w,b)]
def g(x,w,b):
    y=wait(ops.all_gather_into_tensor(x.view(256,1024),RANKS,"0")).view(RANKS,256,1024)
    return [torch.nn.functional.linear(y,w)]
def test_a(fake_group):
    fake_group(RANKS)
    for fn in (f,g):
        for a in (["fuse","lower"],["lower"]):
            gm,_,plan=run(fn,forced("int8","direct",chunks=1),X,W,B,passes=before(a[0]))
            print(gm.graph); print(plan.sites[0].reason, plan.sites[0].algorithm)
