"""An ``ssh`` for programs that reach other machines by it, in a job whose machines have no ssh server."""

from __future__ import annotations

_SHELL = r"""
# horovodrun starts ranks on other machines by ssh. In a job a step does that: no machine needs an ssh server.
starters="$(mktemp -d)"
trap 'rm -r "$starters"' EXIT
cat >"$starters/ssh" <<END
#!/bin/bash
host=
while [ "\$#" -gt 0 ]; do
  case "\$1" in
    -o | -p | -i) shift 2 ;;
    *) [ -z "\$host" ] || break; host="\$1"; shift ;;
  esac
done
exec srun --overlap --nodes=1 --ntasks=1 --nodelist="\$host" {of_step} sh -c "\$*" </dev/null
END
chmod +x "$starters/ssh"
"""


def ssh_by_steps(of_step: str) -> str:
    """Shell that writes it into a directory of its own, ``$starters``, for the PATH of such a program.

    It understands what horovodrun gives: options with a value each, the host, and a command for a shell.

    Args:
        of_step: more options for srun.
    """
    return _SHELL.replace("{of_step}", of_step).strip()
