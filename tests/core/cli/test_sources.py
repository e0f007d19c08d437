"""Flag before environment before file before default, and no unknown name anywhere."""

from __future__ import annotations

import pytest

from enginery.config.schema import EngineOptions
from enginery.config.sources import engine_options
from enginery.errors import ConfigError
from enginery.llm.keyword_options import engine_options as keyword_options


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "engine.toml"
        path.write_text(text)
        return path

    return write


def test_without_sources_there_are_the_defaults():
    assert engine_options({}, {}) == EngineOptions()


def test_the_order_of_the_sources(toml):
    file = toml("page_size = 1\nseed = 1\nnum_pages = 1\n")
    environ = {"ENGINERY_SEED": "2", "ENGINERY_NUM_PAGES": "2"}
    options = engine_options({"num_pages": 3, "page_size": None}, environ, file)
    assert (options.page_size, options.seed, options.num_pages) == (1, 2, 3)


def test_the_environment_is_read_by_type():
    environ = {
        "ENGINERY_MODEL": "m",
        "ENGINERY_PREFIX_CACHE": "false",
        "ENGINERY_MEMORY_FRACTION": "0.5",
        "ENGINERY_BLOCKED_PLUGINS": "a, b,",
        "ENGINERY_STRICT_PLUGINS": "1",
        "HOME": "/",
    }
    options = engine_options({}, environ)
    assert (options.model, options.prefix_cache, options.memory_fraction) == ("m", False, 0.5)
    assert options.blocked_plugins == ("a", "b")


def test_what_is_a_number_or_a_word_may_be_a_number_in_files_and_in_python(toml):
    assert engine_options({}, {}, toml("draft_length = 4\n")).draft_length == "4"
    assert keyword_options("m", {"draft_length": 4}, owner="LLM").draft_length == "4"
    with pytest.raises(ConfigError, match="draft_length"):
        keyword_options("m", {"draft_length": True}, owner="LLM")


def test_the_file_is_read_by_type(toml):
    options = engine_options({}, {}, toml('model = "m"\nprefix_cache = false\nkv_memory_gib = 2\nplugin_options = ["a.b=c"]\n'))
    assert (options.model, options.prefix_cache, options.kv_memory_gib, options.plugin_options) == ("m", False, 2, ("a.b=c",))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ENGINERY_PAGESIZE": "3"}, "ENGINERY_PAGESIZE.*did you mean ENGINERY_PAGE_SIZE"),
        ({"ENGINERY_PAGE_SIZE": "big"}, "ENGINERY_PAGE_SIZE is 'big'.*int"),
        ({"ENGINERY_NO_PLUGINS": "maybe"}, "ENGINERY_NO_PLUGINS"),
        ({"ENGINERY_TENSOR_PARALLEL_SIZE": "2"}, "correct its name; here it is ENGINERY_TP$"),
        ({"ENGINERY_ENFORCE_EAGER": "1"}, "here it is ENGINERY_GRAPHS=FALSE$"),
        ({"ENGINERY_ENFORCE_EAGER": "0"}, "here it is ENGINERY_GRAPHS=TRUE$"),
        ({"ENGINERY_ENABLE_PREFIX_CACHING": "False"}, "here it is ENGINERY_PREFIX_CACHE=FALSE$"),
        ({"ENGINERY_CONFIG": "engine.toml"}, "correct its name; a file of settings is named by --config alone$"),
        ({"ENGINERY_XYZZY": "1"}, "correct its name$"),
    ],
)
def test_a_wrong_variable_is_named(environ, words):
    with pytest.raises(ConfigError, match=words):
        engine_options({}, environ)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page_sise = 3", "engine.toml has the key 'page_sise'.*did you mean page_size"),
        ('page_size = "3"', "page_size in .*engine.toml is '3'.*int"),
        ("page_size = ", "engine.toml is not TOML"),
        ("[xyzzy]\nport = 1", "'xyzzy'.*known are"),
        ("gpu-memory-utilization = 0.9", "'gpu-memory-utilization'.*; here it is memory_fraction, the share of the free memory$"),
        ('config = "other.toml"', "no such setting; a file of settings is named by --config alone$"),
        ("enable_prefix_caching = false", "here it is prefix_cache=false$"),
        ("enable_prefix_caching = true", "that is always so here; leave it out$"),
    ],
)
def test_a_wrong_file_is_named(toml, text, words):
    with pytest.raises(ConfigError, match=words):
        engine_options({}, {}, toml(text))


def test_a_file_may_begin_with_a_byte_order_mark(toml):
    assert engine_options({}, {}, toml("\ufeffpage_size = 3")).page_size == 3


@pytest.mark.parametrize("graphs", ["TRUE", "FALSE"])
def test_what_a_variable_is_said_to_be_here_is_understood(graphs):
    assert engine_options({}, {"ENGINERY_GRAPHS": graphs}).graphs is (graphs == "TRUE")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        engine_options({}, {}, tmp_path / "none.toml")
