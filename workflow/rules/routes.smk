"""recipe_ROUTE: everything that belongs to one route, and nothing else."""

for route in PLAN.recipes:

    rule:
        name:
            f"recipe_{route}"
        input:
            PLAN.route_done(route),
        localrule: True
