import pytest, os
@pytest.mark.xdist_group("gg")
@pytest.mark.parametrize("n", range(2))
def test_a(n, request):
    c = request.config
    print("OPT", c.getoption("dist"), c.getoption("loadgroup","?"), c.invocation_params, os.environ.get("PYTEST_ADDOPTS"), c.inicfg.get("addopts"), [p for p in c.pluginmanager.list_name_plugin() if 'remote' in str(p[1]) or 'WorkerI' in str(p[1])])
    assert 0
